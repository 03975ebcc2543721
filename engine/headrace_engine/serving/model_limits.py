"""Known limits of models: what the store cannot keep, which cannot draft, and what vLLM cannot do
on CPUs.

Everything follows from a model's configuration (the text part of config.json), so `headrace doctor`
tells it before a start, and an engine when it starts. A limit of vLLM's on CPUs has a test in
`tests/unit/test_contracts_cpu_limits.py`, which fails when vLLM lifts it. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

PREFIX_CACHE, REMOTE_PREFILL, STORE = "prefix_cache", "remote_prefill", "store"
SPECULATION = "speculation"
"""Parts that an engine may run without (`MeteredVLLMEngine.left_out`)."""
STATE_LAYERS = frozenset(
    {"linear_attention", "mamba", "mamba2", "hybrid", "conv", "recurrent", "kda"}
)
"""Names of layers that keep a state, in fields such as `layer_types`."""
KEEPS_STATES = "{} has layers that keep a state in place of KV, and the store keeps such states {}"
"""Why there is no store, of the model's class and a condition."""
TEXT_PARTS = ("text_config", "llm_config", "language_config")
"""Fields of config.json with the text part of a multimodal model's configuration."""


@dataclass(frozen=True)
class CpuLimit:
    """A limit of vLLM's kernels for CPUs.

    Attributes:
        layers: the kind of layers.
        part: the part that an engine with such layers runs without on CPUs.
        why: the reason, for operators.
        arguments: vLLM's engine arguments with which such engines work.
    """

    layers: str
    part: str
    why: str
    arguments: Mapping[str, Any] = field(default_factory=dict)


MAMBA2 = CpuLimit(
    "Mamba-2",
    PREFIX_CACHE,
    "vLLM's CPU kernel for Mamba-2 layers returns the state at the end of a prompt only, and the "
    "prefix cache needs the one at a block's end; a GPU engine has the prefix cache",
    {"enable_prefix_caching": False},
)
MLA = CpuLimit(
    "MLA",
    PREFIX_CACHE,
    "vLLM switches it off for MLA on CPUs without AMX, where prompts are computed in one piece; a "
    "GPU engine has the prefix cache",
)


def text_fields(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of a parsed config.json that describes the layers of the text model."""
    return next((config[key] for key in TEXT_PARTS if isinstance(config.get(key), Mapping)), config)


def cpu_limits(fields: Mapping[str, Any]) -> list[CpuLimit]:
    """Return the limits on CPUs of a model with these `text_fields`."""
    found = []
    if _has_mamba2(fields):
        found.append(MAMBA2)
    if fields.get("kv_lora_rank"):
        found.append(MLA)
    return found


def why_no_store(
    architecture: str,
    fields: Mapping[str, Any],
    *,
    has_states: bool,
    has_attention: bool = True,
    has_prefix_cache: bool = True,
) -> str | None:
    """Return why the store cannot keep the KV of a model; None if its configuration allows it.

    Args:
        architecture: the name of the model's class.
        fields: its `text_fields`.
        has_states: whether some of its layers keep a state in place of KV.
        has_attention: whether some of its layers keep KV.
        has_prefix_cache: whether the engine has a prefix cache. States are at block boundaries with
            one only.
    """
    if has_states:
        if not has_attention:
            return KEEPS_STATES.format(architecture, "beside attention only")
        if fields.get("sliding_window"):
            return KEEPS_STATES.format(architecture, "beside full attention, not sliding windows")
        if not has_prefix_cache:
            return KEEPS_STATES.format(architecture, "of engines with a prefix cache only")
    if fields.get("index_topk"):
        return (
            f"{architecture} has an indexer beside MLA, whose keys have another size, and the "
            "store keeps layers of one size"
        )
    return None


def why_no_drafts(architecture: str, *, on_cpu: bool, is_own: bool) -> str | None:
    """Return why an engine with layers that keep a state must not draft; None if it may.

    Args:
        architecture: the name of the model's class.
        on_cpu: whether the engine computes on CPUs.
        is_own: whether the drafter is Headrace's, which prefill engines do not have.
    """
    if on_cpu:
        return (
            f"{architecture} has layers that keep a state in place of KV, and vLLM on CPUs lacks "
            "the kernel that keeps the state of accepted draft tokens: the engine would end, or "
            "answer wrongly"
        )
    if is_own:
        return (
            f"{architecture} has layers that keep a state in place of KV, and states have another "
            "shape in an engine that drafts: no prefill engine could hand them over"
        )
    return None


def has_state_layers(fields: Mapping[str, Any]) -> bool:
    """Return whether some layers of a model with these `text_fields` keep a state in place of KV:
    Mamba, GDN, another linear attention or a short convolution."""
    kinds = {*_words(fields.get("layer_types")), *_words(fields.get("layers_block_type"))}
    if kinds:
        return bool(kinds & STATE_LAYERS)
    return any(name.startswith(("mamba_", "ssm_")) or name == "state_size" for name in fields)


def expected_left_out(config: Mapping[str, Any], *, on_cpu: bool) -> dict[str, str]:
    """Return the parts that an engine of a model will run without, by name, with the reasons.

    Args:
        config: a parsed config.json.
        on_cpu: whether the engine computes on CPUs.
    """
    fields = text_fields(config)
    architecture = str((config.get("architectures") or ["the model"])[0])
    found = {limit.part: limit.why for limit in cpu_limits(fields)} if on_cpu else {}
    why = why_no_store(
        architecture,
        fields,
        has_states=has_state_layers(fields),
        has_attention="num_attention_heads" in fields,
        has_prefix_cache=PREFIX_CACHE not in found,
    )
    if why is not None:
        found[STORE] = why
    if has_state_layers(fields):
        found[SPECULATION] = str(why_no_drafts(architecture, on_cpu=on_cpu, is_own=True))
    return found


def _has_mamba2(fields: Mapping[str, Any]) -> bool:
    """Return whether a model has attention and Mamba-2 layers: only these have chunks."""
    if not has_state_layers(fields):
        return False
    return "mamba_chunk_size" in fields or (
        "chunk_size" in fields and any(name.startswith("mamba_") for name in fields)
    )


def _words(value: Any) -> list[str]:
    return [each for each in value if isinstance(each, str)] if isinstance(value, list) else []
