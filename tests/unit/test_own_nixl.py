"""Which engines get the connector whose pulls are proved and whose NIXL thread sleeps."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.app import _use_own_nixl
from headrace.config.integrity import IntegritySection

OURS = "headrace_engine.pull_proof.connector"
SETTINGS = {"headrace_integrity": IntegritySection().model_dump()}


def test_vllms_nixl_connector_is_loaded_from_our_module() -> None:
    engine: dict[str, Any] = {"kv_transfer_config": {"kv_connector": "NixlConnector"}}
    _use_own_nixl(engine, IntegritySection())
    assert engine["kv_transfer_config"] == {
        "kv_connector": "NixlConnector",
        "kv_connector_module_path": OURS,
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": SETTINGS,
    }


@pytest.mark.parametrize(
    "transfer",
    [
        None,
        {"kv_connector": "LMCacheConnectorV1"},
        {"kv_connector": "NixlConnector", "kv_connector_module_path": "users.own"},
    ],
)
def test_any_other_connector_is_left_as_it_is(transfer: dict[str, str] | None) -> None:
    engine = {"kv_transfer_config": dict(transfer)} if transfer is not None else {}
    _use_own_nixl(engine, IntegritySection())
    assert engine.get("kv_transfer_config") == transfer


def test_vllm_finds_our_class_under_the_name_that_ray_knows() -> None:
    from vllm.config.kv_transfer import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl import NixlConnector

    engine: dict[str, Any] = {
        "kv_transfer_config": {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
    }
    _use_own_nixl(engine, IntegritySection())
    found = KVConnectorFactory.get_connector_class(KVTransferConfig(**engine["kv_transfer_config"]))
    assert found.__module__ == OURS
    assert found is not NixlConnector and issubclass(found, NixlConnector)
