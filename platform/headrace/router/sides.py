"""What the router knows of each prefill replica: its load, its cache, and whether it may be asked.

Each replica has a breaker of its own, so one that fails takes nothing from the others. Until it is
known which replicas there are, there is one side without a name, and Ray Serve chooses the replica.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from headrace.router.cost import CallModel
from headrace.router.index import PrefixIndex
from headrace.router.load import Breaker, EngineLoad
from headrace.router.plan import RouterSettings
from headrace_engine.steptime import StepTime

ANY = ""
"""The side while replicas are not told apart."""


@dataclass(slots=True, eq=False)
class PrefillSide:
    """One prefill replica.

    Attributes:
        replica: its id; empty while replicas are not told apart.
        breaker: whether it may be asked.
        load: what this router has sent there and has not had back.
        index: the blocks that its engine probably holds.
        others: seconds that requests wait there beyond what this router put there.
        others_at_s: when that was measured last.
        measured_s: when it last computed a prompt.
        cold: no request has had its KV from there since it was made, or since it last failed.
        steps: its step times, as it told them; None before it did.
        shares_store: whether it runs on the decode engine's machine, so that both load from one
            store.
    """

    replica: str
    breaker: Breaker
    index: PrefixIndex
    others_at_s: float
    measured_s: float
    load: EngineLoad = field(default_factory=EngineLoad)
    others: CallModel = field(default_factory=lambda: CallModel(0.0, 0.050))
    cold: bool = True
    steps: StepTime | None = None
    shares_store: bool = False

    def others_wait_s(self, now_s: float, half_life_s: float) -> float:
        """Predicted wait that others make there; halves with each `half_life_s` of age."""
        age = max(0.0, now_s - self.others_at_s)
        return float(self.others.seconds() * 0.5 ** (age / half_life_s))

    def down(self, why: str, now_s: float) -> None:
        """The replica is gone, and its cache with it."""
        self.breaker.down(why, now_s)
        self.index.clear()
        self.cold = True

    def to_dict(self, now_s: float) -> dict[str, Any]:
        return {
            "breaker": self.breaker.to_dict(now_s),
            "load": self.load.to_dict(),
            "index_blocks": len(self.index),
            "same_machine": self.shares_store,
            "others_wait_s": self.others.seconds(),
            "measured_s_ago": now_s - self.measured_s,
        }


class PrefillSides(dict[str, PrefillSide]):
    """The prefill replicas that may be asked, by id."""

    def __init__(self, settings: RouterSettings, blocks: int, now_s: float, *, any_: bool) -> None:
        super().__init__()
        self._settings, self._blocks = settings, blocks
        if any_:
            self[ANY] = self.new(ANY, now_s)

    def new(self, replica: str, now_s: float) -> PrefillSide:
        settings = self._settings
        breaker = Breaker(settings.retry_s, settings.retry_max_s)
        # Never measured counts as just stale: it is tried below twice the best price.
        stale_s = now_s - settings.remeasure_s
        return PrefillSide(replica, breaker, PrefixIndex(self._blocks), now_s, stale_s)

    def set_members(self, replicas: Collection[str], now_s: float) -> None:
        """Know these replicas and no others. What is under way at one that left goes on."""
        for gone in self.keys() - set(replicas):
            del self[gone]
        for name in sorted(set(replicas) - self.keys()):
            self[name] = self.new(name, now_s)

    def in_doubt(self, now_s: float) -> list[str]:
        """Those that may not be asked at present, or only once."""
        return [name for name, side in self.items() if side.breaker.state(now_s) != "closed"]

    def refusal(self, now_s: float) -> str | None:
        """Why no prefill replica may be asked, or None if one may."""
        why: str | None = "no prefill replica runs"
        for side in self.values():
            why = side.breaker.refusal(now_s)
            if why is None:
                break
        return why

    def to_dict(self, now_s: float) -> dict[str, Any]:
        """The breaker that matters: of the replica that is best off."""
        order = {"closed": 0, "half-open": 1, "open": 2}
        told = [side.breaker.to_dict(now_s) for side in self.values()]
        best = min(told, key=lambda breaker: order[breaker["state"]], default=None)
        none = {"state": "open", "reason": "no prefill replica runs", "open_s": 0.0, "failures": 0}
        return dict(best or none)
