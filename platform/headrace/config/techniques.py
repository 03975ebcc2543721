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


class BlendingSection(Section):
    """KV blending: stored KV is reused wherever its tokens occur in a prompt (docs/blending.md).
    Needs `store.enabled` with `store.engine.codec: raw`."""

    mode: Mode = _mode("blending", ". It is done only where it saves time")
    recompute_ratio: float = Field(
        default=0.1,
        ge=0,
        le=1,
        description="Part of the reused KV that is recomputed, over all tokens and layers. More is "
        "slower and closer to the exact model. `vllm_xargs.blending` may give another ratio.",
    )
    memory_mb: int = Field(
        default=64,
        ge=1,
        description="Memory of each decode replica for the index of stored prompts, in MB. A token "
        "takes about 6.4 bytes. The oldest prompts are evicted.",
    )


class SparseSection(Section):
    """Answer tokens attend to a part of the KV (docs/sparse.md). Engines on GPUs need
    `calibration`; docs/gpu-measurements.md says what has run on one."""

    mode: Mode = _mode("sparse")
    calibration: str | None = Field(
        default=None,
        min_length=1,
        description="The model's file from `headrace lab calibrate sparse`. It holds the ratio for "
        "the error that you allow, and data that lowers the error of every ratio. The file must be "
        "on each engine's machine. A relative path starts at the configuration file's folder.",
    )
    keep_ratio: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="Part of the KV that each answer token attends to. More is slower and closer "
        "to the exact model. null: the ratio in `calibration`, or 0.1 without one. "
        "`vllm_xargs.sparse` may give another ratio.",
    )
    page_tokens: Literal[16, 32] = Field(
        default=32,
        description="Tokens of a page; pages are selected as a whole. 16 is closer to the exact "
        "model, but exact requests with long prompts then differ from plain vLLM in rounding, and "
        "`techniques.blending` cannot be on.",
    )
    offload_gib: float = Field(
        default=0,
        ge=0,
        description="Host memory of each engine, in GiB, for KV that is offloaded from its cache. "
        "With it the engine serves requests that are too long for the cache. 0: no offload. "
        "On GPUs this memory is locked, and `calibration` must be set.",
    )


class CompressionSection(Section):
    """KV cache compression: a part of a long prompt's KV is dropped (docs/compression.md). The size
    of a page is `techniques.sparse.page_tokens`."""

    mode: Mode = _mode("compression", ", and those that use sparse attention")
    keep_ratio: float = Field(
        default=0.25,
        gt=0,
        le=1,
        description="Part of a prompt's KV that is kept. More is closer to the exact model. "
        "`vllm_xargs.compression` may give another ratio.",
    )
    calibration: str | None = Field(
        default=None,
        min_length=1,
        description="The model's file from `headrace lab calibrate compression`. Without it, a "
        "prompt is read a second time to find the KV that matters least. With it, compression "
        "takes little time and has a larger error. The file must be on each engine's machine. A "
        "relative path starts at the configuration file's folder.",
    )
    incremental: bool = Field(
        default=False,
        description="Compress while the prompt is computed, which decode engines then do, so that "
        "the KV of a whole prompt is never in the cache. Needs `calibration`. false: only for "
        "prompts that are too long for the cache, if `techniques.sparse.offload_gib` is set.",
    )

    @model_validator(mode="after")
    def _incremental_needs_calibration(self) -> Self:
        if self.incremental and self.calibration is None:
            raise ValueError(
                "incremental: needs calibration, a file of `headrace lab calibrate compression`"
            )
        return self


class TechniquesSection(Section):
    """Lossy techniques. None is on by default (docs/techniques.md)."""

    blending: BlendingSection = Field(
        default_factory=BlendingSection, description="KV blending; see the next table."
    )
    sparse: SparseSection = Field(
        default_factory=SparseSection, description="Sparse attention; see the table after it."
    )
    compression: CompressionSection = Field(
        default_factory=CompressionSection,
        description="KV cache compression; see the third table.",
    )
