"""What switches PMR-Tree drafting on in an engine.

    AsyncEngineArgs(model=..., **engine_arguments(16))

Any other of vLLM's drafters is a line of its own instead, as vLLM documents it:
`speculative_config={"method": "ngram", ...}`, "suffix", "eagle3", "draft_model".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from headrace_decode.speculation.planning.draft_planner import Mode

CONFIG_KEY = "headrace_speculation"
"""In the engine's `additional_config`."""

PROPOSER = "headrace_decode.speculation.proposer.HeadraceProposer"
WORKER = "headrace_decode.speculation.drafting_worker.SpeculatingWorker"

Positive = Annotated[float, Meta(gt=0)]


class CarrierSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where the board is over which replicas share, and what carrying may take.

    Attributes:
        store: name of the StoreNode's arena.
        socket_folder: where its socket is; None for the system's temporary folder.
        poll_s: between two polls of the board.
        bytes_per_s: in both directions together, on average.
        timeout_s: until a node counts as away.
    """

    store: Annotated[str, Meta(min_length=1)]
    socket_folder: str | None = None
    poll_s: Positive = 0.2
    bytes_per_s: Positive = 2.0 * 2**20
    timeout_s: Positive = 1.0


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of one engine's drafting.

    Attributes:
        mode: "auto", "off" or "static:K" (`draft_planner.Mode`).
        drafter: "memory" (`draft_memory.Memory`) or "ngram" (the same over the request's own text
            only).
        drafter_options: arguments of `draft_memory.Settings`.
        corpora: whether operators may load corpora for all tenants.
        shared_k: what so many tenants or more were answered alike is drafted for all; None:
            nothing is.
        controls: whether to run random steps without drafts, and drop drafting where they win.
        seed: of those.
        exchange: with it the memory is shared with other replicas through the StoreNode.
    """

    mode: str = "auto"
    drafter: Literal["memory", "ngram"] = "memory"
    drafter_options: dict[str, Any] | None = None
    corpora: bool = False
    shared_k: int | None = None
    controls: bool = True
    seed: int = 0
    exchange: CarrierSettings | None = None

    @staticmethod
    def read(config: Mapping[str, Any]) -> Settings:
        """From `additional_config[CONFIG_KEY]`.

        Raises:
            ValueError: a key is unknown, or a value is wrong.
        """
        try:
            settings = msgspec.convert(dict(config), Settings)
        except msgspec.ValidationError as error:
            raise ValueError(f"{CONFIG_KEY}: {error}") from error
        Mode.parse(settings.mode)
        return settings


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
