"""Models that the store cannot keep are served without it: those with layers that keep a state in
place of KV (Mamba, GDN), and those with an indexer.

The store names a block by its tokens and finds in it the KV of just these. A state is that of a
whole prefix, and lies in cache groups of its own, which vLLM's hybrid cache manager keeps. An
engine of such a model starts with that manager and without the store. Prefill and decode are
apart as for other models: NIXL's connector moves states, too.

`tests/unit/test_contracts_recurrent.py` pins what is used here.
"""

from __future__ import annotations

import os
from typing import Any

from vllm.config import KVTransferConfig, VllmConfig

from headrace_engine.serving.model_limits import why_no_store

STORES = frozenset({"HeadraceConnector", "StoredBlendingConnector"})
"""`kv_connector` of those that read the store, alone or among `connectors`."""


def leave_out_store(config: VllmConfig) -> str | None:
    """Take the store out of the configuration of an engine that has not started, if it cannot keep
    the model's KV.

    Args:
        config: changed.

    Returns:
        Why there is no store; None if there was none or it stays.
    """
    model, transfer = config.model_config, config.kv_transfer_config
    has_states = model.is_hybrid or model.is_attention_free
    fields = model.hf_text_config.to_dict()
    why = why_no_store(model.architecture, fields, has_states=has_states)
    if transfer is None or why is None:
        return None
    children = _children(transfer)
    kept = [child for child in children if child["kv_connector"] not in STORES]
    if len(kept) == len(children):
        return None
    config.kv_transfer_config = None
    if len(kept) == 1:
        config.kv_transfer_config = KVTransferConfig(**kept[0], engine_id=transfer.engine_id)
    elif kept:
        config.kv_transfer_config = transfer
        transfer.kv_connector_extra_config["connectors"] = kept
    if has_states:
        config.scheduler_config.disable_hybrid_kv_cache_manager = False
        if any(child["kv_connector"] == "NixlConnector" for child in kept):
            # vLLM chooses this layout for its own connectors, which it finds by their names.
            os.environ["VLLM_SSM_CONV_STATE_LAYOUT"] = "DS"
    return why


def _children(transfer: KVTransferConfig) -> list[dict[str, Any]]:
    """Return the settings of each connector of an engine."""
    children = transfer.kv_connector_extra_config.get("connectors")
    return list(children) if children else [{"kv_connector": transfer.kv_connector}]
