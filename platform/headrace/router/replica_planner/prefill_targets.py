"""Router's state of each prefill replica: its load, its cache, and its circuit breaker.

Each replica has its own breaker, so a failing replica does not affect the others. Until the
replicas are known, one target with an empty name stands for all, and Ray Serve chooses the replica.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from headrace.router.plan import RouterSettings
from headrace.router.replica_planner.cost_models import OverheadModel
from headrace.router.replica_planner.engine_load import EngineLoad
from headrace.router.replica_planner.prefill_breaker import PrefillBreaker
from headrace.router.replica_planner.prefix_index import PrefixIndex
from headrace_engine.step_time import StepTime

ANY = ""
"""Name of the only target while the replicas are unknown."""


@dataclass(slots=True, eq=False)
class PrefillTarget:
    """One prefill replica.

    Attributes:
        replica: its id; empty while the replicas are unknown.
        breaker: its circuit breaker: whether plans may use it.
        load: work that this router has sent there and that is not done.
        index: the blocks that its engine probably holds.
        others: seconds that requests wait there in addition to the wait for this router's requests.
        others_at_s: when `others` was measured last.
        measured_s: when it last computed a prompt.
        cold: no request has got its KV from there since the start, or since the last failure.
        steps: its step times, sent by the replica; None before that.
        shares_store: whether it runs on the decode engine's machine, so that both load from one
            store.
    """

    replica: str
    breaker: PrefillBreaker
    index: PrefixIndex
    others_at_s: float
    measured_s: float
    load: EngineLoad = field(default_factory=EngineLoad)
    others: OverheadModel = field(default_factory=lambda: OverheadModel(0.0))
    cold: bool = True
    steps: StepTime | None = None
    shares_store: bool = False

    def others_wait_s(self, now_s: float, half_life_s: float) -> float:
        """Return the predicted wait that other routers' requests cause there.

        It halves with each `half_life_s` of its age.
        """
        age = max(0.0, now_s - self.others_at_s)
        return float(self.others.seconds() * 0.5 ** (age / half_life_s))

    def mark_down(self, why: str, now_s: float) -> None:
        """Record that the replica has stopped and its cache is lost."""
        self.breaker.mark_down(why, now_s)
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


class PrefillTargets(dict[str, PrefillTarget]):
    """The prefill replicas that may be asked, by id."""

    def __init__(
        self, settings: RouterSettings, blocks: int, now_s: float, *, allow_any: bool
    ) -> None:
        super().__init__()
        self._settings, self._blocks, self._ends_only = settings, blocks, False
        if allow_any:
            self[ANY] = self.new(ANY, now_s)

    def set_index(self, blocks: int, ends_only: bool) -> None:
        """Set the attributes of each replica's index."""
        self._blocks, self._ends_only = blocks, ends_only
        for target in self.values():
            target.index.resize(blocks)
            target.index.ends_only = ends_only

    def new(self, replica: str, now_s: float) -> PrefillTarget:
        settings = self._settings
        breaker = PrefillBreaker(settings.retry_s, settings.retry_max_s)
        # A replica that was never measured counts as just stale: it may cost twice the best price.
        stale_s = now_s - settings.remeasure_s
        index = PrefixIndex(self._blocks)
        index.ends_only = self._ends_only
        return PrefillTarget(replica, breaker, index, now_s, stale_s)

    def set_members(self, replicas: Collection[str], now_s: float) -> None:
        """Set the known replicas. Requests under way at a removed replica continue."""
        for removed in self.keys() - set(replicas):
            del self[removed]
        for name in sorted(set(replicas) - self.keys()):
            self[name] = self.new(name, now_s)

    def suspects(self, now_s: float) -> list[str]:
        """Return the replicas that may get no request now, or only a trial request."""
        return [name for name, target in self.items() if target.breaker.state(now_s) != "closed"]

    def refusal(self, now_s: float) -> str | None:
        """Return why no prefill replica may get a request, or None if one may."""
        why: str | None = "no prefill replica runs"
        for target in self.values():
            why = target.breaker.refusal(now_s)
            if why is None:
                break
        return why

    def to_dict(self, now_s: float) -> dict[str, Any]:
        """Return the state of the breaker that is closest to closed."""
        order = {"closed": 0, "half-open": 1, "open": 2}
        breakers = [target.breaker.to_dict(now_s) for target in self.values()]
        best = min(breakers, key=lambda breaker: order[breaker["state"]], default=None)
        none = {"state": "open", "reason": "no prefill replica runs", "open_s": 0.0, "failures": 0}
        return dict(best or none)
