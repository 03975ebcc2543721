"""Which engines get the connector whose NIXL thread sleeps."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.app import _use_quiet_nixl

OURS = "headrace_engine.quiet_nixl"


def test_vllms_nixl_connector_is_loaded_from_our_module() -> None:
    engine: dict[str, Any] = {"kv_transfer_config": {"kv_connector": "NixlConnector"}}
    _use_quiet_nixl(engine)
    assert engine["kv_transfer_config"] == {
        "kv_connector": "NixlConnector",
        "kv_connector_module_path": OURS,
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
    _use_quiet_nixl(engine)
    assert engine.get("kv_transfer_config") == transfer


def test_vllm_finds_our_class_under_the_name_that_ray_knows() -> None:
    from vllm.config.kv_transfer import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl import NixlConnector

    engine: dict[str, Any] = {
        "kv_transfer_config": {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
    }
    _use_quiet_nixl(engine)
    found = KVConnectorFactory.get_connector_class(KVTransferConfig(**engine["kv_transfer_config"]))
    assert found.__module__ == OURS
    assert found is not NixlConnector and issubclass(found, NixlConnector)
