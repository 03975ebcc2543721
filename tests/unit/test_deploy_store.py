"""How the KV store gets into an app's engines, and what its section of the configuration takes."""

from __future__ import annotations

import copy
import importlib.util
from typing import Any

import pytest

from headrace.config import ConfigError, load_config, warnings
from headrace.config.store import StoreSection
from headrace.deploy.store import add_store
from headrace.observability import ProcessSetup
from headrace_kvstore.lookup.store_view import store_settings
from headrace_kvstore.settings.node_settings import NodeSettings
from headrace_kvstore.settings.store_settings import StoreSettings

NIXL = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}


def engine(**transfer: Any) -> dict[str, Any]:
    return {"dtype": "float32", "kv_transfer_config": {**NIXL, **transfer}}


class Transfer:
    """vLLM's KVTransferConfig, as far as it is read."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.kv_connector = values["kv_connector"]
        self.kv_connector_extra_config = values.get("kv_connector_extra_config", {})


def test_an_engine_with_nixl_gets_the_store_beside_it() -> None:
    changed = engine(kv_connector_extra_config={"backends": ["UCX"]})
    before = copy.deepcopy(changed["kv_transfer_config"])
    assert add_store(StoreSection(name="kv"), [changed], ProcessSetup()) is not None
    transfer = changed["kv_transfer_config"]
    assert transfer["kv_connector"] == "HeadracePDConnector"
    assert (transfer["kv_role"], transfer["kv_buffer_device"]) == ("kv_both", "cpu")
    nixl, store = transfer["kv_connector_extra_config"]["connectors"]
    assert nixl == {**before, "kv_load_failure_policy": "recompute"}
    assert store["kv_connector"] == "HeadraceConnector"
    assert transfer["kv_load_failure_policy"] == store["kv_load_failure_policy"] == "recompute"
    found = store_settings(Transfer(transfer))
    assert found == StoreSettings(name="kv", dram_bytes=2**30)
    assert changed.keys() == {"dtype", "kv_transfer_config"}


def test_all_engines_of_an_app_share_one_name_that_no_other_app_has() -> None:
    def names() -> set[str]:
        engines = [engine(), engine()]
        add_store(StoreSection(), engines, ProcessSetup())
        found = [store_settings(Transfer(e["kv_transfer_config"])) for e in engines]
        return {settings.name for settings in found if settings is not None}

    [first], [second] = names(), names()
    assert first != second


@pytest.mark.parametrize(
    "transfer", [{"kv_connector": "MultiConnector"}, {"kv_connector": "LMCacheConnectorV1"}]
)
def test_an_engine_with_other_connectors_is_left_as_it_is(transfer: dict[str, str]) -> None:
    given = engine(**transfer)
    before = copy.deepcopy(given)
    assert add_store(StoreSection(), [given], ProcessSetup()) is None
    assert given == before
    assert store_settings(Transfer(given["kv_transfer_config"])) is None


@pytest.mark.parametrize("field", ["engine", "node"])
def test_the_arena_has_the_policy_that_is_set_whether_an_engine_or_the_node_makes_it(
    field: str,
) -> None:
    section = StoreSection.model_validate({field: {"policy": "lru", "socket_folder": "/run/a"}})
    for settings in (section.engine_settings("kv"), section.node_settings("kv")):
        assert (settings["policy"], settings["socket_folder"]) == ("lru", "/run/a")


def test_without_the_store_nothing_changes() -> None:
    given = engine()
    before = copy.deepcopy(given)
    assert add_store(StoreSection(enabled=False), [given], ProcessSetup()) is None
    assert given == before


def test_each_side_gets_its_own_settings_and_the_shared_ones() -> None:
    section = StoreSection(
        dram_gb=0.5,
        nvme_folder="/kv",
        nvme_gb=2,
        nvme_sync=True,
        engine={"copy_threads": 3},
        node={"warm": True},
    )
    assert StoreSettings.parse(section.engine_settings("n")) == StoreSettings(
        name="n", dram_bytes=2**29, copy_threads=3
    )
    node = NodeSettings.parse(section.node_settings("n"))
    assert (node.name, node.dram_bytes, node.nvme_bytes, node.warm) == ("n", 2**29, 2**31, True)
    assert (str(node.nvme_folder), node.nvme_sync) == ("/kv", True)
    assert not NodeSettings.parse(StoreSection(nvme_folder="/kv").node_settings("n")).nvme_sync
    assert (node.object_url, node.listen, node.peers) == (None, None, ())


def test_an_object_store_is_passed_to_the_nodes_and_its_options_are_not_shown() -> None:
    section = StoreSection(
        object_url="s3://b/kv", object_gb=2, object_options={"secret_access_key": "hush"}
    )
    node = NodeSettings.parse(section.node_settings("n"))
    assert (node.object_url, node.object_bytes) == ("s3://b/kv", 2**31)
    assert node.object_options == {"secret_access_key": "hush"}
    assert "hush" not in repr(section) + repr(node)


def test_an_object_store_without_its_client_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "obstore" else found(name)
    )
    with pytest.raises(ConfigError, match=r"store\.object_url: .*headrace\[object\]"):
        load_config(overrides=["store.object_url=s3://b/kv"])


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["store.object_url=foo://b"], "recognise URL"),
        (["store.object_url=s3://b", "store.object_options={regon: x}"], "'regon' is not valid"),
    ],
)
def test_what_the_client_does_not_know_is_warned_of(overrides: list[str], words: str) -> None:
    [line] = [line for line in warnings(load_config(overrides=overrides)) if "object" in line]
    assert "store.object_url" in line and words in line


def test_the_keeper_is_told_whether_machines_share() -> None:
    for share in (True, False):
        app = add_store(StoreSection(share=share), [engine()], ProcessSetup())
        assert app is not None
        assert app._bound_deployment.init_args[2] is share


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("store.engine={depht: 3}", "depht: is unknown"),
        ("store.engine={copy_threads: 0}", "engine.copy_threads: is 0"),
        ("store.node={dram_bytes: 5}", "set store.dram_gb instead"),
        ("store.node={heal_s: -1}", "node.heal_s: is -1"),
        ("store.nvme_folder=kv", "must be an absolute path"),
        ("store.name=a/b", "store.name"),
        ("store.dram_gb=0", "store.dram_gb"),
        ("store.object_url=bucket/kv", 'object_url: must be like "s3://BUCKET/PREFIX"'),
        ("store.object_gb=0", "store.object_gb"),
        ("store.object_options=[a]", "store.object_options: must be a mapping"),
        ("store.node={object_options: {a: b}}", "set store.object_options instead"),
        ("store.share=perhaps", "store.share: must be true or false"),
    ],
)
def test_what_cannot_be_says_where_and_what_would_be_right(override: str, words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_config(overrides=[override])
    assert "store" in str(refused.value) and words in str(refused.value)
