"""The section `techniques`: lossy techniques, which trade a little of the answer for time."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from headrace.config.section import Section


def _mode(technique: str, more: str = "") -> Any:
    """Return the field that says which requests use a technique."""
    return Field(
        default="off",
        description=f"`off`: never. `request`: for requests with `vllm_xargs.{technique}`. `auto`: "
        f"for all requests but those with `vllm_xargs.{technique}` or `vllm_xargs.techniques` set "
        f'to `"off"`{more}.',
    )


Mode = Literal["off", "request", "auto"]


class ReuseSection(Section):
    """Reuse of stored KV wherever its tokens stand in a prompt (docs/reuse.md). Needs
    `store.enabled` with `store.engine.codec: raw`."""

    mode: Mode = _mode("reuse", ". It is done only where it saves time")
    budget: float = Field(
        default=0.1,
        ge=0,
        le=1,
        description="Share of the reused tokens' KV that is computed again, over all layers. More "
        "is slower and closer to the exact model. `vllm_xargs.reuse` may give another share.",
    )
    memory_mb: int = Field(
        default=64,
        ge=1,
        description="Memory of each decode replica for the tokens of stored prompts, in MB: about "
        "6.4 bytes a token. The oldest make room.",
    )


class SparseSection(Section):
    """Answer tokens attend to a part of the KV (docs/sparse.md). Engines on GPUs need
    `calibration`; docs/gpu.md says what has run on one."""

    mode: Mode = _mode("sparse")
    calibration: str | None = Field(
        default=None,
        min_length=1,
        description="The model's file from `headrace lab calibrate sparse`: the share for the "
        "error that you allow, and what makes a share cost less error. Each engine's machine must "
        "hold it. A relative path counts from the configuration file's folder.",
    )
    share: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="Share of its KV that each answer token attends to. More is slower and closer "
        "to the exact model. null: that of `calibration`, or 0.1 without one. "
        "`vllm_xargs.sparse` may give another share.",
    )
    unit_tokens: Literal[16, 32] = Field(
        default=32,
        description="Tokens that are chosen together. 16 is closer to the exact model, but exact "
        "requests on long prompts then differ from plain vLLM in rounding, and "
        "`techniques.reuse` cannot be on.",
    )
    offload_gib: float = Field(
        default=0,
        ge=0,
        description="Host memory of each engine, in GiB, for KV that leaves its cache. Requests "
        "too long for the cache are served so. 0: no KV leaves the cache. Engines on CPUs only.",
    )


class BoundedSection(Section):
    """A part of a long prompt's KV is dropped once the prompt has been read again
    (docs/bounded.md). Engines on CPUs only. Units are those of `techniques.sparse.unit_tokens`."""

    mode: Mode = _mode("bounded", ", and those that are sparse")
    share: float = Field(
        default=0.25,
        gt=0,
        le=1,
        description="Share of a prompt's KV that is kept. More is closer to the exact model. "
        "`vllm_xargs.bounded` may give another share.",
    )
    calibration: str | None = Field(
        default=None,
        min_length=1,
        description="The model's file from `headrace lab calibrate bounded`. With it a prompt is "
        "not read again: what is dropped costs little time, and more error. Each engine's machine "
        "must hold it. A relative path counts from the configuration file's folder.",
    )
    stream: bool = Field(
        default=False,
        description="Have decode engines compute these prompts, and drop KV during that, so that "
        "no prompt is ever held as a whole. Needs `calibration`. false: only prompts that "
        "are too long for the cache, where `techniques.sparse.offload_gib` allows such.",
    )

    @model_validator(mode="after")
    def _streams_with_a_gate(self) -> Self:
        if self.stream and self.calibration is None:
            raise ValueError(
                "stream: needs calibration, a file of `headrace lab calibrate bounded`"
            )
        return self


class KVBudgetSection(Section):
    """A budget for the KV of each decode engine, in place of `decode.kv_cache_gb`. Bounded contexts
    or sparse attention with offload are then on for all requests, or neither: what keeps to the
    budget with the least error (docs/bounded.md). Their `mode` must be `off`."""

    gib: float = Field(
        gt=0,
        description="GiB for the KV cache and what is kept beside it to choose by.",
    )
    contexts: int = Field(
        default=1, ge=1, description="Requests of `model.max_model_len` tokens that run at once."
    )
    answer_tokens: int = Field(
        default=512, ge=1, description="Tokens of these that are the answer. Their KV is kept."
    )
    host_gib: float = Field(
        default=0,
        ge=0,
        description="GiB of host memory for KV that leaves the cache. More than 0 needs "
        "`techniques.sparse.calibration` to be of use.",
    )
    itl_ms: float | None = Field(
        default=None,
        gt=0,
        description="Target for the time between tokens, in milliseconds, with all `contexts` "
        "answering. Less KV is then kept, or attended to, than memory allows. null: none.",
    )
    memory_gbps: float | None = Field(
        default=None,
        gt=0,
        description="With `itl_ms`: GB that an engine reads from memory in a second, for weights "
        "and KV. null: measured on the machine that plans, which takes a second.",
    )


class TechniquesSection(Section):
    """Lossy techniques. None is on by default (docs/techniques.md)."""

    reuse: ReuseSection = Field(
        default_factory=ReuseSection, description="Reuse of stored KV; see the next table."
    )
    sparse: SparseSection = Field(
        default_factory=SparseSection, description="Sparse attention; see the table after it."
    )
    bounded: BoundedSection = Field(
        default_factory=BoundedSection, description="Bounded contexts; see the third table."
    )
    kv_budget: KVBudgetSection | None = Field(
        default=None, description="A budget for KV; see the fourth table. null: none."
    )
