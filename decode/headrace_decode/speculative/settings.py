"""Settings that enable PMR-Tree speculative decoding in an engine.

    AsyncEngineArgs(model=..., **engine_arguments(16))

To use one of vLLM's own drafters instead, set its configuration as vLLM documents it:
`speculative_config={"method": "ngram", ...}`, "suffix", "eagle3", "draft_model".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from headrace_decode.speculative.planning.draft_planner import DraftMode
from headrace_engine.extensions.extension import EXTENSIBLE_WORKER

CONFIG_KEY = "headrace_speculation"
"""Key of the settings in the engine's `additional_config`."""

PROPOSER = "headrace_decode.speculative.proposer.HeadraceProposer"

Positive = Annotated[float, Meta(gt=0)]


class ReplicationSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The gossip log over which replicas share their memories, and the limits of the transfers.

    Attributes:
        store: name of the StoreNode's arena.
        socket_folder: folder of the StoreNode's socket; None for the system's temporary folder.
        poll_s: seconds between two polls of the log.
        bytes_per_s: maximum average rate, in both directions together.
        timeout_s: seconds until a node counts as away.
    """

    store: Annotated[str, Meta(min_length=1)]
    socket_folder: str | None = None
    poll_s: Positive = 0.2
    bytes_per_s: Positive = 2.0 * 2**20
    timeout_s: Positive = 1.0


class SpeculationSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The settings of one engine's speculative decoding.

    Attributes:
        mode: "auto", "off" or "static:K" (`draft_planner.DraftMode`).
        drafter_options: arguments of `draft_memory.MemorySettings`.
        corpora: whether operators may load corpora for all tenants.
        replication: how the memory is shared with other replicas through the StoreNode; None: it is
            not shared.
    """

    mode: str = "auto"
    drafter_options: dict[str, Any] | None = None
    corpora: bool = False
    replication: ReplicationSettings | None = None

    @staticmethod
    def read(config: Mapping[str, Any]) -> SpeculationSettings:
        """Read the settings from `additional_config[CONFIG_KEY]`.

        Raises:
            ValueError: a key is unknown, or a value is invalid.
        """
        try:
            settings = msgspec.convert(dict(config), SpeculationSettings)
        except msgspec.ValidationError as error:
            raise ValueError(f"{CONFIG_KEY}: {error}") from error
        DraftMode.parse(settings.mode)
        return settings


def engine_arguments(draft_tokens: int, **settings: Any) -> dict[str, Any]:
    """Return the arguments of a vLLM engine that drafts at most `draft_tokens` a row and step.

    vLLM does not apply the schedule by batch size to a custom class. Its presence keeps the
    scheduler from filling a decode request that joins the batch (its KV came from elsewhere) up to
    `1 + draft_tokens` tokens with placeholders.

    Raises:
        ValueError: a key is unknown, or a value is invalid.
    """
    SpeculationSettings.read(settings)
    return {
        "worker_cls": EXTENSIBLE_WORKER,
        "speculative_config": {
            "method": "custom_class",
            "model": PROPOSER,
            "num_speculative_tokens": draft_tokens,
            "num_speculative_tokens_per_batch_size": [[1, 1, draft_tokens]],
        },
        "additional_config": {CONFIG_KEY: settings},
    }
