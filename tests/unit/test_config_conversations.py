"""The section `gateway.conversations`: what it takes, and where the state then lies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from headrace.config import GatewaySettings
from headrace.config.checks.configuration import warnings
from headrace.config.conversations import ConversationSettings
from headrace.config.schema import HeadraceConfig
from headrace.gateway.conversations.setup import StateSetup, folder_of
from headrace.gateway.kept_records.object_store import ObjectRecordStore
from headrace.gateway.kept_records.sqlite_store import FILE, SqliteStore


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"folder": "relative"}, "folder"),
        ({"folder": ""}, "folder"),
        ({"object_url": "bucket"}, "object_url"),
        ({"folder": "/a", "object_url": "s3://b"}, ""),
        ({"ttl_s": 0}, "ttl_s"),
        ({"max_tenant_bytes": 1}, "max_tenant_bytes"),
        ({"max_background": 0}, "max_background"),
        ({"path": "/a"}, "path"),
    ],
)
def test_a_wrong_value_is_refused_with_its_path(fields: dict[str, Any], path: str) -> None:
    with pytest.raises(ValidationError) as refused:
        GatewaySettings(conversations=fields)  # type: ignore[arg-type]
    [error] = refused.value.errors()
    assert ".".join(map(str, error["loc"])) == f"conversations.{path}".rstrip(".")


@pytest.mark.parametrize(
    ("fields", "address", "warned"),
    [
        ({"replicas": 2}, "auto", True),
        ({"replicas": 2}, None, False),
        ({"replicas": 1}, "auto", False),
        ({"replicas": 2, "conversations": {"object_url": "s3://a"}}, "auto", False),
        ({"replicas": 2, "conversations": {"enabled": False}}, "auto", False),
    ],
)
def test_several_gateways_of_a_cluster_are_told_to_share(
    fields: dict[str, Any], address: str | None, warned: bool
) -> None:
    config = HeadraceConfig.model_validate({"gateway": fields, "ray": {"address": address}})
    found = [line for line in warnings(config) if "conversations" in line]
    assert bool(found) is warned


def no_secret(made: bytes) -> bytes:
    raise AssertionError("the configuration has one")


def test_a_configured_secret_is_used_and_no_other_made(tmp_path: Path) -> None:
    setup = StateSetup(ConversationSettings(), "a-secret-of-ours")
    state = setup.make(lambda: tmp_path, no_secret)
    assert state is not None and state._read_secret() == b"a-secret-of-ours"


def test_without_one_the_cluster_keeps_a_random_one(tmp_path: Path) -> None:
    made: list[bytes] = []

    def cluster(secret: bytes) -> bytes:
        made.append(secret)
        return made[0]

    states = [StateSetup(ConversationSettings()).make(lambda: tmp_path, cluster) for _ in range(2)]
    secrets = [state._read_secret() for state in states if state is not None]
    assert secrets == [made[0]] * 2 and len(set(made)) == 2 and len(made[0]) == 32


def test_nothing_is_kept_where_it_is_switched_off(tmp_path: Path) -> None:
    setup = StateSetup(ConversationSettings(enabled=False))
    assert setup.make(lambda: tmp_path, no_secret) is None


def test_the_state_lies_where_the_configuration_says(tmp_path: Path) -> None:
    default, own = tmp_path / "default", tmp_path / "own"
    kinds = []
    for fields in ({}, {"folder": str(own)}, {"object_url": f"file://{tmp_path}/objects"}):
        state = StateSetup(ConversationSettings(**fields), "s" * 16).make(
            lambda: default, no_secret
        )
        assert state is not None
        kinds.append(type(state._open_store()))
    assert kinds == [SqliteStore, SqliteStore, ObjectRecordStore]
    assert (default / FILE).exists() and (own / FILE).exists()


def test_apps_of_a_session_have_folders_of_their_own() -> None:
    names = ["a", "a/b", "a%2Fb", ".."]
    folders = {folder_of(Path("/session"), name) for name in names}
    assert len(folders) == 4
    assert all(folder.parent == Path("/session") for folder in folders)


def test_the_secret_is_not_in_the_setups_text() -> None:
    assert "hidden" not in repr(StateSetup(ConversationSettings(), "hidden", {"key": "hidden"}))
