"""Registration of the models with vLLM: entry point `headrace_cross_layer` of
`vllm.general_plugins`."""

from __future__ import annotations

ARCHITECTURES = {
    "KVFusionLlamaForCausalLM": "headrace_prefill.cross_layer.engine.model:CrossLayerForCausalLM",
    "KVFusionQwen3ForCausalLM": "headrace_prefill.cross_layer.engine.model:CrossLayerForCausalLM",
}
"""Allowed names in `architectures` of config.json. `model_type` distinguishes the two styles."""


def register() -> None:
    """Register the models; vLLM calls this in each of its processes, perhaps twice."""
    from vllm import ModelRegistry

    for architecture, model in ARCHITECTURES.items():
        ModelRegistry.register_model(architecture, model)
