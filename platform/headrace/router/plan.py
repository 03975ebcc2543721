"""Data types of routing: the request, the plan, the report of its prefill, the settings.

They are frozen dataclasses without behaviour beyond validation. The router, the servers that carry
out plans, the simulator and the tests share them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, NamedTuple

from msgspec import Meta

from headrace.placement_policies import COST
from headrace_engine.kv_groups import BlockUse
from headrace_kvstore.lookup.availability import MEDIA, AvailableRun

Kind = Literal["local", "remote"]
Policy = Literal["cost", "local", "remote"]


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """One prompt that needs a plan."""

    request_id: str
    token_ids: Sequence[int]
    #: Seeds the block hashes, so that tenants with different salts never share a block.
    salt: str = ""
    #: Why this request must stay on the decode engine (e.g. prompt logprobs), or None.
    local_only: str | None = None
    #: Leading runs of tokens whose KV the store can supply to the decode engine.
    stored: Sequence[AvailableRun] = ()


MAX_RUNS, MAX_REASONS, MAX_REASON_CHARS = 32, 4, 400
"""Bounds of a plan that another process made."""
Name = Annotated[str, Meta(max_length=128)]
Reasons = Annotated[
    tuple[Annotated[str, Meta(max_length=MAX_REASON_CHARS)], ...], Meta(max_length=MAX_REASONS)
]
Tokens = Annotated[int, Meta(ge=0, le=1 << 40)]
Seconds = Annotated[float, Meta(ge=-1e9, le=1e9)]


class Run(NamedTuple):
    """A run of a prompt, and the source of its KV for the engine that prefills."""

    source: Annotated[str, Meta(pattern="^(hbm|compute|dram|nvme|remote|object)$")]
    """`hbm` (its own prefix cache), a medium of its node's store, or `compute`."""
    tokens: Tokens


Runs = Annotated[tuple[Run, ...], Meta(max_length=MAX_RUNS)]


@dataclass(frozen=True, slots=True)
class Plan:
    """Decision where a prompt's KV is made, with its predicted price and its reasons.

    The bounds of the fields hold for plans that come from another process (`plan_codec`).
    """

    request_id: Name
    #: Name of the prefill deployment; None prefills on the decode engine itself.
    prefill: Name | None
    prompt_tokens: Tokens
    cached_decode_tokens: Tokens
    cached_prefill_tokens: Tokens
    #: Maximum of leading tokens that one engine's cache, or one node's store, held.
    reachable_tokens: Tokens = 0
    #: The decode replica that answers; empty for the one that made the plan.
    decode: Name = ""
    #: The prefill replica to ask; empty lets Ray Serve choose one.
    replica: Name = ""
    #: The prompt from its beginning to its end, as the engine that prefills it gets it.
    runs: Runs = ()
    #: The same for the decode engine, should the remote prefill fail; empty when local.
    fallback: Runs = ()
    #: Seconds by part for the best local and the best remote choice: "local.queue", ...,
    #: "remote.total".
    predicted: Annotated[Mapping[Name, Seconds], Meta(max_length=32)] = field(default_factory=dict)
    #: How long to wait for the remote prefill and its KV before going local; 0 when local.
    timeout_s: Seconds = 0.0
    reasons: Reasons = ()
    #: The targets that this choice does not keep, nor any other that may be chosen.
    broken: Reasons = ()
    #: Whether a more expensive engine was chosen in order to measure it again.
    explores: bool = False
    #: The id under which a gateway made this plan; empty if the decode replica made it.
    plan_id: Name = ""

    @property
    def kind(self) -> Kind:
        return "local" if self.prefill is None else "remote"

    @property
    def made_by(self) -> Literal["gateway", "replica"]:
        return "gateway" if self.plan_id else "replica"

    @property
    def loaded_from(self) -> dict[str, int]:
        """Tokens that the engine loads from the store in addition to its own cache, by medium.

        The medium is the one at the time of the plan: dram, nvme, remote, object.
        """
        loaded: dict[str, int] = {}
        for source, tokens in self.runs:
            if source in MEDIA:
                loaded[source] = loaded.get(source, 0) + tokens
        return loaded

    @property
    def loaded_tokens(self) -> int:
        return sum(self.loaded_from.values())

    @property
    def compute_tokens(self) -> int:
        """Prompt tokens that the chosen engine is expected to compute."""
        local = self.prefill is None
        cached = self.cached_decode_tokens if local else self.cached_prefill_tokens
        return max(1, self.prompt_tokens - cached - self.loaded_tokens)

    @property
    def predicted_ttft_s(self) -> float:
        """This request's own wait: the total without the others' losses."""
        p, kind = self.predicted, self.kind
        rest = sum(p.get(f"{kind}.{part}", 0.0) for part in ("stall", "behind"))
        return p.get(f"{kind}.total", 0.0) - rest

    def prefilled_locally(self, why: str) -> Plan:
        """Return the plan after its remote prefill failed: the decode engine prefills."""
        return replace(
            self,
            prefill=None,
            timeout_s=0.0,
            runs=self.fallback or self.runs,
            fallback=(),
            reasons=(f"remote prefill failed, prefilling locally: {why}", *self.reasons),
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the plan for JSON: the answer of ``GET /headrace/v1/plans/{request_id}``."""
        return {
            "request_id": self.request_id,
            "plan_id": self.plan_id,
            "made_by": self.made_by,
            "kind": self.kind,
            "prefill": self.prefill,
            "decode": self.decode,
            "replica": self.replica,
            "prompt_tokens": self.prompt_tokens,
            "cached_decode_tokens": self.cached_decode_tokens,
            "cached_prefill_tokens": self.cached_prefill_tokens,
            "reachable_tokens": self.reachable_tokens,
            "loaded_tokens": self.loaded_tokens,
            "loaded_from": self.loaded_from,
            "runs": [run._asdict() for run in self.runs],
            "fallback": [run._asdict() for run in self.fallback],
            "predicted": dict(self.predicted),
            "timeout_s": self.timeout_s,
            "broken": list(self.broken),
            "explores": self.explores,
            "reasons": list(self.reasons),
        }


@dataclass(frozen=True, slots=True)
class PrefillReport:
    """Measurements of a remote prefill by the caller and the prefill engine."""

    #: Duration of the whole call, measured by the decode replica.
    call_s: float
    #: Part of the call that the request waited in the prefill engine before its first step.
    queue_s: float
    #: Part of the call from the first step to the finished KV.
    compute_s: float
    #: Prompt tokens that the prefill engine found in its prefix cache, and tokens that it computed.
    cached_tokens: int
    computed_tokens: int
    #: The replica that computed the prompt; empty if it did not send its id.
    replica: str = ""
    #: Whether this replica runs on the decode engine's machine.
    shares_store: bool = False
    #: Whether the prompt had media, whose way takes a part of the call.
    has_media: bool = False
    #: Whether the prefill engine has a prefix cache.
    has_prefix_cache: bool = True


@dataclass(frozen=True, slots=True)
class Geometry:
    """Sizes of the KV caches, reported by the engines; both have the same block and token sizes."""

    block_tokens: int
    kv_bytes_per_token: int
    #: Capacity of each engine's KV cache, in blocks.
    decode_blocks: int
    prefill_blocks: int
    #: Blocks that a request takes in each cache.
    block_use: BlockUse = field(default_factory=BlockUse)
    #: Whether the decode engine has a prefix cache. Prefill engines tell it with their answers.
    has_prefix_cache: bool = True

    def __post_init__(self) -> None:
        for name in ("block_tokens", "kv_bytes_per_token", "decode_blocks", "prefill_blocks"):
            if getattr(self, name) < 1:
                raise ValueError(f"geometry.{name} must be at least 1, not {getattr(self, name)}")

    @property
    def block_bytes(self) -> int:
        return self.block_tokens * self.kv_bytes_per_token


@dataclass(frozen=True, slots=True)
class RouterSettings:
    """Settings of the router; none of them is a prompt length that decides where to prefill."""

    #: "cost" compares predicted seconds; "local" and "remote" force one kind.
    policy: Policy = "cost"
    #: Name of the placement policy (`placement.policies`) that chooses the engines.
    placement: str = COST
    #: Longest engine step that running streams should see; None sets no target.
    itl_target_s: float | None = None
    #: Longest predicted time to first token that a plan may have without a refusal.
    ttft_target_s: float | None = None
    #: Age of an engine's measurements from which a new one may cost twice the best choice's time.
    remeasure_s: float = 60.0
    #: Maximum prompt tokens of one step: longer prompts take several steps.
    max_step_tokens: int = 2048
    #: Minimum timeout of the first remote prefill, and of the first after a failure, as these
    #: include handshake and warm-up.
    timeout_cold_s: float = 15.0
    #: First and maximum wait after a failed remote prefill before a trial request is sent; the wait
    #: doubles with each failure.
    retry_s: float = 5.0
    retry_max_s: float = 120.0

    def __post_init__(self) -> None:
        if self.policy not in ("cost", "local", "remote"):
            raise ValueError(f"router.policy must be cost, local or remote, not {self.policy!r}")
        for name in ("itl_target_s", "ttft_target_s"):
            target = getattr(self, name)
            if target is not None and not target > 0:
                raise ValueError(f"router.{name} must be above 0, not {target}")
        for name in ("remeasure_s", "timeout_cold_s", "retry_s", "retry_max_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"router.{name} must be above 0, not {getattr(self, name)}")
        if self.max_step_tokens < 1:
            raise ValueError(
                f"router.max_step_tokens must be at least 1, not {self.max_step_tokens}"
            )
