"""The KV store in an app's arguments: in each engine's connectors, and as a StoreNode on each node.

An engine that moves KV over NIXL gets the store beside it (`HeadracePDConnector`); one that the
user gave other connectors is left as it is.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from ray import serve
from ray.serve.deployment import Application

from headrace.config.store import StoreSection
from headrace.observability import ProcessSetup
from headrace.observability.shared_memory import SHM, watch_siblings
from headrace.observability.store import RayStoreMetrics
from headrace_engine.store_nodes.manager import StoreNodeManager
from headrace_kvstore.arena.shared_file import remove_unused_files

logger = logging.getLogger("headrace.store")

NAMES = "headrace-kv-"
"""Beginning of the names of arenas. No later start uses a name again."""
_CONNECTOR_FIELDS = ("kv_connector", "kv_connector_module_path", "kv_connector_extra_config")


@dataclass(frozen=True)
class StoreProcessSetup:
    """Preparation of the store's processes. The StoreNode of each machine also removes the files
    that killed processes left in /dev/shm: arenas of apps that were not deleted before Ray was
    stopped, and memory that replicas share, because Ray may kill the process of Python's that would
    remove it."""

    process: ProcessSetup

    def __call__(self, role: str) -> None:
        self.process(role)
        if role == "store-node":
            remove_unused_files(SHM, f"{NAMES}*")
            watch_siblings()


def add_store(
    store: StoreSection, engines: list[dict[str, Any]], setup: ProcessSetup
) -> Application | None:
    """Add the store to engines' arguments. Return the deployment that keeps the nodes' StoreNodes.

    Args:
        store: the configuration's section.
        engines: `engine_kwargs` of all roles; changed in place.
        setup: prepares the store's processes (logs, traces).

    Returns:
        None where no engine takes the store.
    """
    if not store.enabled:
        return None
    name = store.name or f"{NAMES}{secrets.token_hex(4)}"
    taken = [_add(engine, store.engine_settings(name)) for engine in engines]
    if not any(taken):
        logger.warning("store: no engine uses NixlConnector alone, so none gets the KV store")
        return None
    options = {"name": "store", "num_replicas": 1, "ray_actor_options": {"num_cpus": 0}}
    below = {"nvme": store.nvme_folder, "object": store.object_url}
    tiers = ("dram", *(tier for tier, place in below.items() if place))
    observe = partial(RayStoreMetrics, tiers)
    return (
        serve.deployment(StoreNodeManager)
        .options(**options)
        .bind(store.node_settings(name), StoreProcessSetup(setup), store.share, observe)
    )


def why_no_store(engine: Mapping[str, Any]) -> str | None:
    """Return why an engine with these `engine_kwargs` gets no store; None if it gets one."""
    transfer = engine.get("kv_transfer_config")
    if isinstance(transfer, dict) and transfer.get("kv_connector") == "NixlConnector":
        return None
    return (
        "its kv_transfer_config is not NixlConnector alone; remove it from the engine's arguments "
        "to have the store"
    )


def _add(engine: dict[str, Any], settings: dict[str, Any]) -> bool:
    if why_no_store(engine) is not None:
        return False
    transfer = engine["kv_transfer_config"]
    recompute = {"kv_load_failure_policy": "recompute"}
    stored = {
        "kv_connector": "HeadraceConnector",
        "kv_connector_module_path": "headrace_engine.store_connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": settings,
    }
    engine["kv_transfer_config"] = {
        **{k: v for k, v in transfer.items() if k not in _CONNECTOR_FIELDS},
        **recompute,
        "kv_connector": "HeadracePDConnector",
        "kv_connector_module_path": "headrace_engine.connector.composite",
        "kv_connector_extra_config": {
            "connectors": [{**transfer, **recompute}, {**stored, **recompute}]
        },
    }
    return True
