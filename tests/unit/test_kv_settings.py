"""The store connector's settings: what is taken, and what a wrong value is answered."""

from __future__ import annotations

import re
from typing import Any

import pytest

from headrace_kvstore.blocks.slot_record import tenant_number
from headrace_kvstore.settings.node_settings import NodeSettings
from headrace_kvstore.settings.store_settings import SettingsError, StoreSettings


def test_nothing_given_is_a_whole_configuration() -> None:
    assert StoreSettings.parse({}) == StoreSettings()


@pytest.mark.parametrize(
    ("text", "size"), [(4096, 4096), ("4096", 4096), ("2GiB", 2**31), (" 1.5 mib ", 3 * 2**19)]
)
def test_sizes(text: Any, size: int) -> None:
    assert StoreSettings.parse({"dram_bytes": text}).dram_bytes == size


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("dram_bytes", 0),
        ("dram_bytes", "2 apples"),
        ("name", "../x"),
        ("name", ""),
        ("load", "no"),
        ("lease_s", -1),
        ("lease_s", "long"),
        ("node_timeout_s", 0),
        ("priced", 1),
        ("codec", "zip"),
        ("copy_threads", 0),
        ("copy_threads", 1.5),
        ("drem_bytes", 1),
    ],
)
def test_a_wrong_value_is_named(field: str, value: Any) -> None:
    with pytest.raises(SettingsError, match=rf"kv_connector_extra_config\.{field}: "):
        StoreSettings.parse({field: value})


def test_quotas_are_sizes_by_cache_salt() -> None:
    given = StoreSettings.parse({"quotas": {"acme": "1GiB", "b": 5}, "default_quota": "2MiB"})
    assert given.quota_options == {
        "quotas": {tenant_number("acme"): 2**30, tenant_number("b"): 5},
        "default_quota": 2**21,
    }
    assert StoreSettings.parse({}).quota_options == {"quotas": {}, "default_quota": None}


@pytest.mark.parametrize(
    "extra, message",
    [
        ({"quotas": 5}, "quotas: is 5: "),
        ({"quotas": {"": 5}}, "quotas."),
        ({"quotas": {"acme": "much"}}, "quotas.acme: is 'much'"),
        ({"default_quota": 0}, "default_quota: is 0"),
        ({"policy": "mru"}, "policy: is 'mru': Input should be 'cost-aware' or 'lru'"),
    ],
)
def test_wrong_quotas_and_policies_are_refused(extra: dict[str, object], message: str) -> None:
    with pytest.raises(SettingsError, match=re.escape(message)):
        StoreSettings.parse(extra)
    with pytest.raises(SettingsError, match=re.escape(message)):
        NodeSettings.parse(extra)
