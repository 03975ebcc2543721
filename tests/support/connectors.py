"""Transfer configurations of engines, with the connectors that tests use."""

from __future__ import annotations

from typing import Any

from headrace_engine.kv_transfer.compatibility import CHECKS_KEY
from headrace_engine.kv_transfer.ports import free_port_block


def side_channel(ranks: int = 1) -> dict[str, str]:
    """Environment of an engine that hands KV to others over NIXL: where they ask for it."""
    return {
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port_block(1 + ranks, "127.0.0.1")),
    }


def store_connector(store: dict[str, Any]) -> dict[str, Any]:
    """A transfer configuration with a KV store of these settings."""
    return connector_of("HeadraceConnector", "headrace_engine.store_connector", store)


def blending_connector(store: dict[str, Any]) -> dict[str, Any]:
    """A transfer configuration that reuses the KV of a store of these settings."""
    module = "headrace_prefill.blending.engine.stored_connector"
    return connector_of("StoredBlendingConnector", module, store)


def checked_nixl_connector() -> dict[str, Any]:
    """A transfer configuration with NIXL, and a fingerprint of all KV."""
    checks = {CHECKS_KEY: {"check": "sampled", "rate": 1.0}}
    return connector_of("NixlConnector", "headrace_engine.pull_proof.connector", checks)


def beside(*connectors: dict[str, Any]) -> dict[str, Any]:
    """A transfer configuration with several connectors."""
    settings = {"connectors": list(connectors)}
    return connector_of("HeadracePDConnector", "headrace_engine.connector.composite", settings)


def connector_of(name: str, module: str, settings: dict[str, Any]) -> dict[str, Any]:
    return {
        "kv_connector": name,
        "kv_connector_module_path": module,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": settings,
    }
