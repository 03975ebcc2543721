"""What switches PMR-Tree drafting on in an engine.

    AsyncEngineArgs(model=..., **engine_arguments(16))

Any other of vLLM's drafters is a line of its own instead, as vLLM documents it:
`speculative_config={"method": "ngram", ...}`, "suffix", "eagle3", "draft_model".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from headrace_decode.speculation.planning.draft_planner import Mode

if TYPE_CHECKING:
    from headrace_decode.speculation.sharing.carrier import CarrierSettings

CONFIG_KEY = "headrace_speculation"
"""In the engine's `additional_config`."""

PROPOSER = "headrace_decode.speculation.proposer.HeadraceProposer"
WORKER = "headrace_decode.speculation.drafting_worker.SpeculatingWorker"
DRAFTERS = ("memory", "ngram")


@dataclass(frozen=True)
class Settings:
    """Of one engine's drafting.

    Attributes:
        mode: "auto", "off" or "static:K" (`draft_planner.Mode`).
        drafter: "memory" (`draft_memory.Memory`), "ngram" (the same over the request's own text
            only), or "module:function", which returns a `draft.Drafter`.
        drafter_options: arguments of its settings, or of that function.
        corpora: whether operators may load corpora for all tenants.
        shared_k: what so many tenants or more were answered alike is drafted for all; None:
            nothing is.
        controls: whether to run random steps without drafts and heed what they say.
        seed: of those.
        exchange: arguments of `carrier.CarrierSettings`; with them the memory is shared with other
            replicas through the StoreNode. None: it is not.
    """

    mode: str = "auto"
    drafter: str = "memory"
    drafter_options: Mapping[str, Any] | None = None
    corpora: bool = False
    shared_k: int | None = None
    controls: bool = True
    seed: int = 0
    exchange: Mapping[str, Any] | None = None

    @staticmethod
    def read(config: Mapping[str, Any]) -> Settings:
        """From `additional_config[CONFIG_KEY]`.

        Raises:
            ValueError: a key is unknown, or a value is wrong.
        """
        known = {field.name for field in fields(Settings)}
        unknown = sorted(set(config) - known)
        if unknown:
            raise ValueError(f"{CONFIG_KEY}: unknown {unknown}; known are {sorted(known)}")
        settings = Settings(**config)
        Mode.parse(settings.mode)
        if settings.drafter not in DRAFTERS and settings.drafter.count(":") != 1:
            raise ValueError(
                f"{CONFIG_KEY}.drafter {settings.drafter!r}: expected one of {', '.join(DRAFTERS)} "
                "or module:function"
            )
        settings.carrier()
        return settings

    def carrier(self) -> CarrierSettings | None:
        """`exchange`, read.

        Raises:
            ValueError: a key is unknown, or a value is wrong.
        """
        if self.exchange is None:
            return None
        from headrace_decode.speculation.sharing.carrier import CarrierSettings

        try:
            return CarrierSettings(**self.exchange)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{CONFIG_KEY}.exchange: {error}") from error


def engine_arguments(draft_tokens: int, **settings: Any) -> dict[str, Any]:
    """Arguments of a vLLM engine that drafts: at most `draft_tokens` a row and step.

    The schedule by batch size says nothing to a class of one's own; that there is one keeps the
    scheduler from filling a decode request that joins the batch (its KV came from elsewhere) up to
    `1 + draft_tokens` tokens with placeholders.

    Raises:
        ValueError: as `Settings.read`.
    """
    Settings.read(settings)
    return {
        "worker_cls": WORKER,
        "speculative_config": {
            "method": "custom_class",
            "model": PROPOSER,
            "num_speculative_tokens": draft_tokens,
            "num_speculative_tokens_per_batch_size": [[1, 1, draft_tokens]],
        },
        "additional_config": {CONFIG_KEY: settings},
    }
