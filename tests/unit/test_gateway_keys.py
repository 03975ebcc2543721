"""API keys: who a key stands for, what it may use, and a file that changes under a running app."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from headrace.config.file_stamp import FIRST_RETRY_S
from headrace.config.key_file import KeyEntry, KeyFile, hash_of, read_keys, write_keys
from headrace.gateway.errors import ApiError
from headrace.gateway.ingress import api_keys as keys_module
from headrace.gateway.ingress.api_keys import ANONYMOUS, ApiKeys
from headrace.gateway.ingress.rate_limit import RateLimit
from tests.support.clock import Clock


def entry(key: str, **values: object) -> dict[str, object]:
    return {"name": key, "hash": hash_of(key.encode()), "tenant": "shop", **values}


def file_of(folder: Path, *entries: dict[str, object]) -> Path:
    file = folder / "keys.yaml"
    file.write_text(yaml.safe_dump({"keys": list(entries)}))
    return file


def raising(error: Exception) -> Callable[..., Any]:
    def read(*_: object, **__: object) -> Any:
        raise error

    return read


def bearer(key: str) -> bytes:
    return b"Bearer " + key.encode()


def refused(keys: ApiKeys, authorization: bytes | None) -> int:
    with pytest.raises(ApiError) as caught:
        keys.caller(authorization)
    return caught.value.status


def refused_or_none(keys: ApiKeys, authorization: bytes) -> int | None:
    try:
        keys.caller(authorization)
    except ApiError as error:
        return error.status
    return None


def test_without_keys_everybody_is_one_trust_domain() -> None:
    keys = ApiKeys()
    assert not keys
    assert keys.caller(None) is ANONYMOUS and ANONYMOUS.tenant is None


def test_a_key_stands_for_its_tenant_and_role(tmp_path: Path) -> None:
    keys = ApiKeys(file=str(file_of(tmp_path, entry("abc"), entry("root", role="admin"))))
    assert keys.caller(bearer("abc")).tenant == "shop"
    assert keys.caller(bearer("abc")).role == "user"
    assert keys.caller(bearer("root")).role == "admin"


@pytest.mark.parametrize(
    "header", [None, b"", b"Bearer", b"Bearer ", b"Bearer wrong", b"Basic abc", b"abc", b"\xff\xfe"]
)
def test_any_other_header_is_refused(tmp_path: Path, header: bytes | None) -> None:
    assert refused(ApiKeys(file=str(file_of(tmp_path, entry("abc")))), header) == 401


@given(st.binary(max_size=64))
def test_no_bytes_but_the_key_open_the_door(header: bytes) -> None:
    keys = ApiKeys(plain=["right-key"])
    if header.strip() != b"right-key":
        assert refused(keys, b"Bearer " + header) == 401


def test_each_key_of_the_configuration_is_a_tenant_of_its_own() -> None:
    keys = ApiKeys(plain=["first-key", "second-key"])
    first, second = (keys.caller(bearer(k)) for k in ("first-key", "second-key"))
    assert first.tenant != second.tenant
    assert first.role == "user"


async def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    keys = ApiKeys(file=str(file_of(tmp_path, entry("old"))))
    file_of(tmp_path, entry("new", tenant="b"))
    await keys.refresh()
    assert keys.caller(bearer("new")).tenant == "b"
    assert refused(keys, bearer("old")) == 401


async def test_a_revoked_key_is_refused_soon_also_while_no_request_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keys_module, "CHECK_INTERVAL_S", 0.01)
    keys = ApiKeys(file=str(file_of(tmp_path, entry("old"))))
    keys.start()
    try:
        file_of(tmp_path, entry("new"))
        async with asyncio.timeout(10):
            while refused_or_none(keys, bearer("old")) is None:
                await asyncio.sleep(0.01)
    finally:
        await keys.aclose()


USELESS = ["", "keys: [", "keys: []", "a plain line", "keys: [{name: x}]", "keys: {}", "- keys"]


@pytest.mark.parametrize("text", USELESS)
async def test_a_file_that_becomes_useless_changes_nothing_and_is_shown(
    tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    file = file_of(tmp_path, entry("abc"))
    keys = ApiKeys(file=str(file))
    assert not keys.are_stale
    file.write_text(text)
    with caplog.at_level(logging.ERROR):
        await keys.refresh()
    assert keys.caller(bearer("abc")).tenant == "shop"
    assert "stay as they were" in caplog.text
    assert keys.are_stale


async def test_a_file_that_is_removed_changes_nothing(tmp_path: Path) -> None:
    file = file_of(tmp_path, entry("abc"))
    keys = ApiKeys(file=str(file))
    file.unlink()
    await keys.refresh()
    assert keys.caller(bearer("abc")).tenant == "shop"
    assert keys.are_stale


async def test_a_file_that_cannot_be_read_is_tried_again_until_it_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    keys = ApiKeys(file=str(file_of(tmp_path, entry("bob"))), now_s=clock)
    file_of(tmp_path, entry("new"))
    with monkeypatch.context() as patched:
        patched.setattr(Path, "read_text", raising(PermissionError(13, "Permission denied")))
        await keys.refresh()
        assert keys.caller(bearer("bob")).tenant == "shop"
    await keys.refresh()  # its time has not come yet
    assert keys.are_stale
    clock.now_s += FIRST_RETRY_S
    await keys.refresh()
    assert refused(keys, bearer("bob")) == 401
    assert not keys.are_stale


async def test_a_change_of_mode_or_owner_alone_is_seen_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = file_of(tmp_path, entry("bob"))
    keys = ApiKeys(file=str(file), now_s=Clock())
    file_of(tmp_path, entry("new"))
    with monkeypatch.context() as patched:
        patched.setattr(Path, "read_text", raising(PermissionError(13, "Permission denied")))
        await keys.refresh()
    file.chmod(0o640)
    await keys.refresh()
    assert refused(keys, bearer("bob")) == 401


async def test_a_file_is_parsed_off_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`benchmarks.hostile` measures the longest stall."""
    keys = ApiKeys(file=str(file_of(tmp_path, entry("old"))))
    file_of(tmp_path, entry("new"))
    threads = set()
    read = keys_module.read_entries

    def seen(file: Path) -> Iterator[KeyEntry]:
        threads.add(threading.get_ident())
        return read(file)

    monkeypatch.setattr(keys_module, "read_entries", seen)
    await keys.refresh()
    assert threads and threading.get_ident() not in threads


def test_reading_many_keys_leaves_few_objects_to_the_garbage_collector(tmp_path: Path) -> None:
    """A collection of many objects holds the interpreter, and with it every stream."""
    many = [KeyEntry(name=f"k{n}", hash=hash_of(b"%d" % n), tenant="shop") for n in range(2000)]
    write_keys(tmp_path / "keys.yaml", KeyFile(keys=many))
    del many
    gc.collect()
    before = len(gc.get_objects())
    keys = ApiKeys(file=str(tmp_path / "keys.yaml"))
    assert len(gc.get_objects()) - before < 200
    assert keys.caller(bearer("1999")).name == "k1999"


@pytest.mark.parametrize(
    ("keys", "fault"),
    [
        ([{"name": "a"}], "keys[0].hash"),
        ([entry("a", role="root")], "keys[0].role"),
        ([entry("a", hash="sha256:short")], "keys[0].hash"),
        ([entry("a", colour="red")], "keys[0].colour"),
        ([entry("a", max_concurrent=0)], "keys[0].max_concurrent"),
        ([entry("a", tenant="a b")], "keys[0].tenant"),
        ([entry("a", slo_classes="x")], "keys[0].slo_classes"),
        ([entry("ok"), entry("a", slo="x", slo_classes=["y"])], "keys[1]"),
        ([entry("a", tenant="a\n")], "keys[0].tenant"),
        ([entry("a"), entry("a")], "two keys have the name"),
        ([entry("a"), {**entry("a"), "name": "b"}], "two keys have the hash"),
    ],
)
def test_a_wrong_file_is_refused_at_start_with_the_path_to_the_field(
    tmp_path: Path, keys: list[dict[str, object]], fault: str
) -> None:
    with pytest.raises(ValueError, match=fault.replace("[", r"\[").replace("]", r"\]")):
        ApiKeys(file=str(file_of(tmp_path, *keys)))


def test_a_missing_file_is_refused_at_start(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot read"):
        ApiKeys(file=str(tmp_path / "nowhere"))


def test_a_key_has_no_more_requests_under_way_than_it_may() -> None:
    limit = RateLimit(name="a", max_concurrent=1)
    with limit.request(0.0):
        with pytest.raises(ApiError) as caught, limit.request(0.0):
            pass
        assert caught.value.status == 429
    with limit.request(0.0):
        pass


def test_a_key_sends_no_more_a_minute_than_it_may_and_is_told_when_to_come_again() -> None:
    limit = RateLimit(name="a", requests_per_minute=2)
    for _ in range(2):
        with limit.request(100.0):
            pass
    with pytest.raises(ApiError) as caught, limit.request(100.0):
        pass
    assert caught.value.status == 429
    assert dict(caught.value.headers)[b"retry-after"] == b"30"
    with limit.request(130.0):
        pass


async def test_what_a_key_has_under_way_outlives_a_new_file(tmp_path: Path) -> None:
    clock = Clock()
    keys = ApiKeys(file=str(file_of(tmp_path, entry("abc"))), now_s=clock)
    with keys.caller(bearer("abc")).rate_limit.request(clock()):
        file_of(tmp_path, entry("abc", max_concurrent=1))
        await keys.refresh()
        with pytest.raises(ApiError), keys.caller(bearer("abc")).rate_limit.request(clock()):
            pass


def test_a_written_file_is_the_owners_alone_and_reads_back(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    written = KeyFile(keys=[KeyEntry(**entry("abc", requests_per_minute=5))])  # type: ignore[arg-type]
    write_keys(file, written)
    assert os.stat(file).st_mode & 0o777 == 0o600
    assert read_keys(file) == written
    assert [each.name for each in tmp_path.iterdir()] == ["keys.yaml"]


def test_a_replaced_file_keeps_its_owner_group_and_mode(tmp_path: Path) -> None:
    """A gateway that runs as another user than `headrace keys` can read it as before."""
    file = tmp_path / "keys.yaml"
    write_keys(file, KeyFile(keys=[KeyEntry(**entry("a"))]))  # type: ignore[arg-type]
    file.chmod(0o640)
    if os.getuid() == 0:
        os.chown(file, 1234, 2345)
    before = file.stat()
    write_keys(file, KeyFile(keys=[KeyEntry(**entry("b"))]))  # type: ignore[arg-type]
    after = file.stat()
    assert (after.st_uid, after.st_gid, after.st_mode) == (
        before.st_uid,
        before.st_gid,
        before.st_mode,
    )


def test_a_file_whose_owner_cannot_be_kept_stays_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "keys.yaml"
    write_keys(file, KeyFile(keys=[KeyEntry(**entry("a"))]))  # type: ignore[arg-type]
    before, mine = file.read_bytes(), os.fstat

    def of_another(descriptor: int) -> Any:
        return os.stat_result([*mine(descriptor)[:4], 99, *mine(descriptor)[5:10]])

    monkeypatch.setattr(os, "fstat", of_another)
    monkeypatch.setattr(os, "fchown", raising(PermissionError(1, "Operation not permitted")))
    with pytest.raises(PermissionError, match="run the command as that user"):
        write_keys(file, KeyFile(keys=[KeyEntry(**entry("b"))]))  # type: ignore[arg-type]
    assert file.read_bytes() == before
    assert [each.name for each in tmp_path.iterdir()] == ["keys.yaml"]


def test_a_link_to_a_file_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    file, link = tmp_path / "real" / "keys.yaml", tmp_path / "keys.yaml"
    link.symlink_to(file)
    write_keys(link, KeyFile(keys=[KeyEntry(**entry("a"))]))  # type: ignore[arg-type]
    assert link.is_symlink() and read_keys(file).keys[0].name == "a"


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("keys: &a [*a]", "an alias"),
        ("keys: []\n---\nkeys: []", "second document"),
        ("keys: [{name: a, name: b}]", "twice"),
        ("other: 1", "other: is there twice, or unknown"),
        ("keys: [" + "[" * 50, "nested too deeply|is no YAML"),
        ("keys: [!!python/object:os.system {}]", "keys|tag"),
    ],
)
def test_a_file_that_is_no_plain_list_of_keys_is_refused(
    tmp_path: Path, text: str, fault: str
) -> None:
    (tmp_path / "keys.yaml").write_text(text)
    with pytest.raises(ValueError, match=fault):
        read_keys(tmp_path / "keys.yaml")
