"""API keys: who a key stands for, what it may use, and a file that changes under a running app."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from headrace.config.keyfile import KeyEntry, KeyFile, hash_of, read_keys, write_keys
from headrace.gateway.door.keys import ANYONE, LOOK_EVERY_S, Caller, Keys
from headrace.gateway.errors import ApiError
from tests.support.clock import Clock


def entry(key: str, **values: object) -> dict[str, object]:
    return {"name": key, "hash": hash_of(key.encode()), "tenant": "shop", **values}


def file_of(folder: Path, *entries: dict[str, object]) -> Path:
    file = folder / "keys.yaml"
    file.write_text(yaml.safe_dump({"keys": list(entries)}))
    return file


def bearer(key: str) -> bytes:
    return b"Bearer " + key.encode()


def refused(keys: Keys, authorization: bytes | None) -> int:
    with pytest.raises(ApiError) as caught:
        keys.caller(authorization)
    return caught.value.status


def test_without_keys_everybody_is_one_trust_domain() -> None:
    keys = Keys()
    assert not keys
    assert keys.caller(None) is ANYONE and ANYONE.tenant is None


def test_a_key_stands_for_its_tenant_and_role(tmp_path: Path) -> None:
    keys = Keys(file=str(file_of(tmp_path, entry("abc"), entry("root", role="admin"))))
    assert keys.caller(bearer("abc")).tenant == "shop"
    assert keys.caller(bearer("abc")).role == "user"
    assert keys.caller(bearer("root")).role == "admin"


@pytest.mark.parametrize(
    "header", [None, b"", b"Bearer", b"Bearer ", b"Bearer wrong", b"Basic abc", b"abc", b"\xff\xfe"]
)
def test_any_other_header_is_refused(tmp_path: Path, header: bytes | None) -> None:
    assert refused(Keys(file=str(file_of(tmp_path, entry("abc")))), header) == 401


@given(st.binary(max_size=64))
def test_no_bytes_but_the_key_open_the_door(header: bytes) -> None:
    keys = Keys(plain=["right-key"])
    if header.strip() != b"right-key":
        assert refused(keys, b"Bearer " + header) == 401


def test_each_key_of_the_configuration_is_a_tenant_of_its_own() -> None:
    keys = Keys(plain=["first-key", "second-key"])
    first, second = (keys.caller(bearer(k)) for k in ("first-key", "second-key"))
    assert first.tenant != second.tenant
    assert first.role == "user"


def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    clock = Clock()
    file = file_of(tmp_path, entry("old"))
    keys = Keys(file=str(file), now_s=clock)
    file_of(tmp_path, entry("new", tenant="b"))
    assert keys.caller(bearer("old")).tenant == "shop"  # it has not been looked at yet
    clock.now_s += LOOK_EVERY_S
    assert keys.caller(bearer("new")).tenant == "b"
    assert refused(keys, bearer("old")) == 401


@pytest.mark.parametrize("text", ["", "keys: [", "keys: []", "a plain line", "keys: [{name: x}]"])
def test_a_file_that_becomes_useless_changes_nothing(
    tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    file = file_of(tmp_path, entry("abc"))
    keys = Keys(file=str(file), now_s=clock)
    file.write_text(text)
    clock.now_s += LOOK_EVERY_S
    with caplog.at_level(logging.ERROR):
        assert keys.caller(bearer("abc")).tenant == "shop"
    assert "stay as they were" in caplog.text


def test_a_file_that_is_removed_changes_nothing(tmp_path: Path) -> None:
    clock = Clock()
    file = file_of(tmp_path, entry("abc"))
    keys = Keys(file=str(file), now_s=clock)
    file.unlink()
    clock.now_s += LOOK_EVERY_S
    assert keys.caller(bearer("abc")).tenant == "shop"


@pytest.mark.parametrize(
    ("keys", "fault"),
    [
        ([{"name": "a"}], "keys[0].hash"),
        ([entry("a", role="root")], "keys[0].role"),
        ([entry("a", hash="sha256:short")], "keys[0].hash"),
        ([entry("a", colour="red")], "keys[0].colour"),
        ([entry("a", max_concurrent=0)], "keys[0].max_concurrent"),
        ([entry("a", tenant="a b")], "keys[0].tenant"),
        ([entry("a"), entry("a")], "two keys have the name"),
        ([entry("a"), {**entry("a"), "name": "b"}], "two keys have the hash"),
    ],
)
def test_a_wrong_file_is_refused_at_start_with_the_path_to_the_field(
    tmp_path: Path, keys: list[dict[str, object]], fault: str
) -> None:
    with pytest.raises(ValueError, match=fault.replace("[", r"\[").replace("]", r"\]")):
        Keys(file=str(file_of(tmp_path, *keys)))


def test_a_missing_file_is_refused_at_start(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot read"):
        Keys(file=str(tmp_path / "nowhere"))


def test_a_key_has_no_more_requests_under_way_than_it_may() -> None:
    caller = Caller(name="a", max_concurrent=1)
    with caller.request(0.0):
        with pytest.raises(ApiError) as caught, caller.request(0.0):
            pass
        assert caught.value.status == 429
    with caller.request(0.0):
        pass


def test_a_key_sends_no_more_a_minute_than_it_may_and_is_told_when_to_come_again() -> None:
    caller = Caller(name="a", requests_per_minute=2)
    for _ in range(2):
        with caller.request(100.0):
            pass
    with pytest.raises(ApiError) as caught, caller.request(100.0):
        pass
    assert caught.value.status == 429
    assert dict(caught.value.headers)[b"retry-after"] == b"30"
    with caller.request(130.0):
        pass


def test_what_a_key_has_under_way_outlives_a_new_file(tmp_path: Path) -> None:
    clock = Clock()
    keys = Keys(file=str(file_of(tmp_path, entry("abc"))), now_s=clock)
    with keys.caller(bearer("abc")).request(clock()):
        file_of(tmp_path, entry("abc", max_concurrent=1))
        clock.now_s += LOOK_EVERY_S
        with pytest.raises(ApiError), keys.caller(bearer("abc")).request(clock()):
            pass


def test_a_written_file_is_the_owners_alone_and_reads_back(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    written = KeyFile(keys=[KeyEntry(**entry("abc", requests_per_minute=5))])  # type: ignore[arg-type]
    write_keys(file, written)
    assert os.stat(file).st_mode & 0o777 == 0o600
    assert read_keys(file) == written
    assert [each.name for each in tmp_path.iterdir()] == ["keys.yaml"]
