"""The families, and what plain vLLM needs to serve each of them on a CPU."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from benchmarks.families.cases import Lengths

BLOCK = 32
"""Tokens of a block, where the model leaves the choice."""
MLA_BLOCK = 16
"""The only block that vLLM's CPU kernel for MLA knows."""


ANY_LENGTHS = Lengths()


@dataclass(frozen=True)
class Family:
    """A family of models.

    Attributes:
        name: of `tests.support.families.FAMILIES`.
        title: for readers.
        layers: the kinds of its layers.
        dtype: that the engines compute in.
        lengths: of its prompts.
        options: of each engine of the family.
        limit: what plain vLLM cannot do with it on a CPU; empty if nothing was found.
    """

    name: str
    title: str
    layers: str
    dtype: str = "float32"
    lengths: Lengths = ANY_LENGTHS
    options: dict[str, Any] = field(default_factory=lambda: {"block_size": BLOCK})
    limit: str = ""


FULL, EXPERTS = "full attention", "full attention, experts"
STATE_LENGTHS = Lengths(300, 700)
"""Blocks of models with states are longer: a block's KV and a state take the same bytes."""
FAMILIES = (
    Family("llama", "Llama", FULL),
    Family("qwen3", "Qwen3", FULL),
    Family("qwen3_moe", "Qwen3-MoE", EXPERTS),
    Family("mistral", "Mistral", "sliding windows only"),
    Family("mixtral", "Mixtral", EXPERTS),
    Family("phi3", "Phi-3", FULL),
    Family("ernie4_5", "ERNIE 4.5", FULL),
    Family("glm4_moe", "GLM-4-MoE", EXPERTS),
    Family("gemma3", "Gemma 3", "full attention, sliding windows"),
    Family("gpt_oss", "gpt-oss", "full attention with sinks, sliding windows, experts"),
    Family("olmo3", "OLMo 3", "full attention, sliding windows"),
    Family("llama4", "Llama 4", "full attention, attention in chunks, experts"),
    Family(
        "deepseek_v3",
        "DeepSeek V3",
        "MLA, experts",
        lengths=Lengths(multiple=MLA_BLOCK),
        options={
            "block_size": MLA_BLOCK,
            "attention_config": {"backend": "CPU_MLA"},
            "enable_chunked_prefill": False,
        },
        limit="computes each prompt in one piece, so a hit must be all of it but one token",
    ),
    Family(
        "qwen3_next",
        "Qwen3-Next",
        "full attention, GDN states, experts",
        dtype="bfloat16",
        lengths=STATE_LENGTHS,
        options={},
        limit="computes GDN in bfloat16 only, in another order in steps of other lengths",
    ),
    Family(
        "falcon_h1",
        "Falcon-H1",
        "full attention and Mamba-2 states in each layer",
        lengths=STATE_LENGTHS,
        options={},
    ),
    Family(
        "granite",
        "Granite 4 hybrid",
        "full attention, Mamba-2 states, experts",
        lengths=STATE_LENGTHS,
        options={},
    ),
)
BY_NAME = {family.name: family for family in FAMILIES}
