"""Models with layers that keep a state in place of KV (Mamba, GDN): their store and their drafts.

The store keeps states beside the KV of attention layers if vLLM keeps states at block boundaries,
as it does with prefix caching. Such an engine needs vLLM's hybrid cache manager. Engines whose
states or KV the store cannot keep start without it. Prefill and decode are apart as for other
models: NIXL's connector moves states, too. It does not see that states of engines with other
numbers of draft tokens have other shapes.

`tests/unit/test_contracts_recurrent.py` pins what is used here.
"""

from __future__ import annotations

import os
from typing import Any

from vllm.config import KVTransferConfig, VllmConfig

from headrace_engine.connector.identity.engine_identity import lossy_codec
from headrace_engine.serving.model_limits import KEEPS_STATES, why_no_drafts, why_no_store
from headrace_engine.vllm.platforms import runs_on_cpu

STORE, BLENDING = "HeadraceConnector", "StoredBlendingConnector"
"""`kv_connector` of those that read the store, alone or among `connectors`."""


def leave_out_store(config: VllmConfig) -> str | None:
    """Prepare the configuration of an engine that has not started for the store, if its model has
    layers with states: choose vLLM's hybrid cache manager. Take the store out if it cannot keep the
    model's KV or states.

    Args:
        config: changed.

    Returns:
        Why there is no store; None if there was none or it stays.
    """
    transfer = config.kv_transfer_config
    children = [] if transfer is None else _children(transfer)
    if not any(child["kv_connector"] in (STORE, BLENDING) for child in children):
        return None
    has_states = keeps_states(config)
    if has_states:
        config.scheduler_config.disable_hybrid_kv_cache_manager = False
        if any(child["kv_connector"] == "NixlConnector" for child in children):
            # vLLM chooses this layout for its own connectors, which it finds by their names.
            os.environ["VLLM_SSM_CONV_STATE_LAYOUT"] = "DS"
    if (why := _why_no_store(config, has_states)) is not None:
        _keep(config, [each for each in children if each["kv_connector"] not in (STORE, BLENDING)])
    elif has_states:  # blending cannot recompute such layers, and has no part in their manager
        _keep(config, [each for each in children if each["kv_connector"] != BLENDING])
    return why


def keeps_states(config: VllmConfig) -> bool:
    """Return whether layers of an engine's model keep a state in place of KV."""
    return bool(config.model_config.is_hybrid or config.model_config.is_attention_free)


def why_no_speculation(config: VllmConfig) -> str | None:
    """Return why an engine with this configuration must not draft as it says; None if it may, or
    does not."""
    drafter = config.speculative_config
    if drafter is None or not keeps_states(config):
        return None
    return why_no_drafts(
        config.model_config.architecture,
        on_cpu=runs_on_cpu(),
        is_own=drafter.method == "custom_class",
    )


def _why_no_store(config: VllmConfig, has_states: bool) -> str | None:
    model, cache = config.model_config, config.cache_config
    if (
        why := why_no_store(
            model.architecture,
            model.hf_text_config.to_dict(),
            has_states=has_states,
            has_attention=not model.is_attention_free,
            has_prefix_cache=not has_states or cache.mamba_cache_mode == "align",
        )
    ) is not None:
        return why
    if has_states and lossy_codec(config.kv_transfer_config):
        return KEEPS_STATES.format(model.architecture, "with codec: raw only")
    return None


def _keep(config: VllmConfig, kept: list[dict[str, Any]]) -> None:
    """Leave an engine these of its connectors."""
    transfer = config.kv_transfer_config
    assert transfer is not None
    if len(kept) == len(_children(transfer)):
        return
    if len(kept) > 1:
        transfer.kv_connector_extra_config["connectors"] = kept
        return
    config.kv_transfer_config = None
    if kept:
        config.kv_transfer_config = KVTransferConfig(**kept[0], engine_id=transfer.engine_id)


def _children(transfer: KVTransferConfig) -> list[dict[str, Any]]:
    """Return the settings of each connector of an engine."""
    children = transfer.kv_connector_extra_config.get("connectors")
    return list(children) if children else [{"kv_connector": transfer.kv_connector}]
