"""Makes the models known to vLLM: the entry point `headrace_fusion` of `vllm.general_plugins`."""

from __future__ import annotations

ARCHITECTURES = {
    "KVFusionLlamaForCausalLM": "headrace_prefill.fusion.engine.model:KVFusionForCausalLM",
    "KVFusionQwen3ForCausalLM": "headrace_prefill.fusion.engine.model:KVFusionForCausalLM",
}
"""What `architectures` in config.json may name. `model_type` tells the two styles apart."""


def register() -> None:
    """Called by vLLM in each of its processes, perhaps twice."""
    from vllm import ModelRegistry

    for architecture, model in ARCHITECTURES.items():
        ModelRegistry.register_model(architecture, model)
