"""The store connector's settings: what is taken, and what a wrong value is answered."""

from __future__ import annotations

from typing import Any

import pytest

from headrace_kvstore.connector.settings import SettingsError, StoreSettings, parse_bytes


def test_nothing_given_is_a_whole_configuration() -> None:
    assert StoreSettings.parse({}) == StoreSettings()


@pytest.mark.parametrize(
    ("text", "size"), [(4096, 4096), ("4096", 4096), ("2GiB", 2**31), (" 1.5 mib ", 3 * 2**19)]
)
def test_sizes(text: Any, size: int) -> None:
    assert parse_bytes("x", text) == size


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("dram_bytes", 0),
        ("dram_bytes", "2 apples"),
        ("dram_bytes", True),
        ("name", "../x"),
        ("name", ""),
        ("load", "no"),
        ("lease_s", -1),
        ("lease_s", "long"),
        ("node_timeout_s", 0),
        ("priced", 1),
        ("codec", "zip"),
        ("copy_threads", 0),
        ("depth", 1.5),
        ("drem_bytes", 1),
    ],
)
def test_a_wrong_value_is_named(field: str, value: Any) -> None:
    with pytest.raises(SettingsError, match=rf"kv_connector_extra_config\.{field}: .*; give "):
        StoreSettings.parse({field: value})
