"""The data that a prefill and a decode engine exchange to hand finished KV over.

The protocol is that of vLLM's pull connectors (NixlConnector): the prefill request carries
`produce_params()`; its answer carries the parameters with which the decode engine then pulls the
blocks. Pure data; the engines do the moving.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from headrace_engine.adapters.settings import AdapterRef

PARAMS_KEY = "kv_transfer_params"
"""Key of the transfer parameters in vLLM's `SamplingParams.extra_args`."""


CHECK_KEY = "headrace_check"
"""Key in the parameters of a prefill: whether its KV gets fingerprints (docs/integrity.md)."""


BLENDING_KEY = "headrace_blending"
"""Key in the parameters of a request: stored runs that its KV is made from (docs/blending.md)."""


BLENDED_KEY = "headrace_blended"
"""Key in the parameters of a pull: the KV was made from such runs, and is approximate."""


def produce_params(
    check: bool = False, blending: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return parameters that make an engine keep a request's KV for another engine to pull.

    Args:
        check: make fingerprints of it, in the sample or not.
        blending: stored runs that it is made from.
    """
    demand = {CHECK_KEY: True} if check else {}
    return {
        **demand,
        **({BLENDING_KEY: dict(blending)} if blending else {}),
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
    }


def pull_params(kept: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters with which an engine pulls KV.

    Without the number of tokens that the producer had cached: vLLM would report it as the puller's
    own number of cached tokens.

    Args:
        kept: the producer's answer.
    """
    return {key: value for key, value in kept.items() if key != "remote_prefill_cached_tokens"}


@dataclass(frozen=True, slots=True)
class PrefillRequest:
    """A prompt to prefill for another engine."""

    request_id: str
    token_ids: bytes
    """int32 little-endian token ids: they cross the process border without a Python list."""
    compute_tokens: int = 0
    """Number of them that the caller expects the engine to compute, since the others are cached or
    stored; 0 if it expects nothing."""
    replica: str = ""
    """The prefill replica that the caller planned with; empty lets Ray Serve choose."""
    salt: str | None = None
    """The tenant's cache salt: equal tokens under different salts share no block."""
    priority: int = 0
    trace_headers: dict[str, str] | None = None
    plan_id: str = ""
    """The id of the gateway's plan that this carries out; empty for a plan of the caller's own."""
    check: bool = False
    """Have the KV checked byte for byte: the caller distrusts the replica."""
    kv: str = ""
    """The caller's `KvKind` as text; empty if it takes any."""
    blending: Mapping[str, Any] | None = None
    """Stored runs that the KV may be made from, as the caller found them."""
    adapter: AdapterRef | None = None
    """The LoRA adapter that the KV is made with; None for the model itself."""
    media: bytes = b""
    """The prompt's processed images, sound and video (`kv_transfer.media`); empty for text."""
    client_id: str = ""
    """The client's id of the request, under which the prefill replica records its usage; empty for
    a request of the caller's own."""
    retain_s: float = 0.0
    """Seconds for which the store of the prefill replica's machine retains the prompt's KV."""
    resumes: bool = False
    """Whether it is the prompt of a stream that another replica began."""


@dataclass(frozen=True, slots=True)
class PrefillResult:
    """The place of a prefilled prompt's KV, and the cost of the prefill."""

    kv_params: dict[str, Any]
    """Parameters with which the decode engine pulls the blocks."""
    queue_s: float
    compute_s: float
    cached_tokens: int
    computed_tokens: int
    replica: str = ""
    """The id of the prefill replica."""
    machine: str = ""
    """Ray's id of the prefill engine's node. On the caller's own node, both share one store."""
    step_time: Mapping[str, Any] = field(default_factory=dict)
    """The prefill engine's step times: `StepTime.to_dict()`."""
    loads: tuple[tuple[str, int, float], ...] = ()
    """Its loads from the KV store since the last answer: (medium, bytes, seconds)."""
    has_media: bool = False
    """Whether the prompt had images, sound or video, whose way takes a part of the call."""
    has_prefix_cache: bool = True
    """Whether the prefill engine has a prefix cache."""
    usage: Mapping[str, float] = field(default_factory=dict)
    """Usage of the prefill engine by the prompt (`RequestUsage.to_dict`)."""


class PrefillError(RuntimeError):
    """The prefill engine answered without KV to pull."""


class PrefillAdapterError(PrefillError):
    """The prefill replica cannot use the request's LoRA adapter."""
