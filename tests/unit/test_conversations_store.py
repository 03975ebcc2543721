"""The stores of conversation state: what is found, what goes first, and what faults leave."""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.gateway.conversations.tenant_state import TenantState
from headrace.gateway.kept_records import sqlite_store
from headrace.gateway.kept_records.object_store import (
    ListedThread,
    ObjectRecordStore,
    surplus,
)
from headrace.gateway.kept_records.record_cipher import DamagedRecordError, RecordCipher
from headrace.gateway.kept_records.record_store import (
    RECORD_BYTES,
    RecordStore,
    StoreError,
    ThreadFullError,
)
from headrace.gateway.kept_records.sqlite_store import FILE, SqliteStore

TENANT, OTHER, THREAD = "a" * 32, "b" * 32, "0" * 16
TTL_S = 100.0
Open = Callable[..., RecordStore]


@pytest.fixture(params=["sqlite", "objects"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Open:
    """Opens a store of each kind, with the records that were written before."""

    def open_store(max_bytes: int = 1_000_000) -> RecordStore:
        if request.param == "sqlite":
            return SqliteStore(tmp_path, TTL_S, max_bytes)
        return ObjectRecordStore(f"file://{tmp_path}/objects", {}, TTL_S, max_bytes)

    return open_store


def thread(number: int) -> str:
    return f"{number:016x}"


# Both kinds


def test_records_are_found_by_tenant_thread_and_name(opened: Open) -> None:
    store, now = opened(), time.time()
    store.write(TENANT, THREAD, {"turn-a": b"1", "turn-b": b"22"}, now)
    assert store.read(TENANT, THREAD, ["turn-a", "turn-b", "turn-c"], now) == {
        "turn-a": b"1",
        "turn-b": b"22",
    }
    assert store.sizes(TENANT, THREAD, now) == {"turn-a": 1, "turn-b": 2}
    assert store.read(OTHER, THREAD, ["turn-a"], now) == {}
    assert store.read(TENANT, thread(1), ["turn-a"], now) == {}
    assert store.sizes(OTHER, THREAD, now) == {}


def test_a_record_is_replaced_and_removed(opened: Open) -> None:
    store, now = opened(), time.time()
    store.write(TENANT, THREAD, {"turn-a": b"1", "turn-b": b"2"}, now)
    store.write(TENANT, THREAD, {"turn-a": b"new"}, now)
    store.remove(TENANT, THREAD, ["turn-b", "turn-c"])
    assert store.read(TENANT, THREAD, ["turn-a", "turn-b"], now) == {"turn-a": b"new"}
    store.remove(TENANT, THREAD, ["turn-a"])
    store.remove(TENANT, THREAD, ["turn-a"])
    assert store.sizes(TENANT, THREAD, now) == {}


def test_a_record_is_created_once(opened: Open) -> None:
    store, now = opened(), time.time()
    assert store.create(TENANT, THREAD, {"turn-a": b"1"}, now) == {"turn-a"}
    both = {"turn-a": b"2", "turn-b": b"22"}
    assert opened().create(TENANT, THREAD, both, now) == {"turn-b"}
    assert store.read(TENANT, THREAD, ["turn-a", "turn-b"], now) == {
        "turn-a": b"1",
        "turn-b": b"22",
    }
    store.remove(TENANT, THREAD, ["turn-a"])
    assert store.create(TENANT, THREAD, {"turn-a": b"3"}, now) == {"turn-a"}


def test_a_store_that_is_opened_again_has_its_records(opened: Open) -> None:
    store, now = opened(), time.time()
    store.write(TENANT, THREAD, {"turn-a": b"1"}, now)
    store.close()
    assert opened().read(TENANT, THREAD, ["turn-a"], now) == {"turn-a": b"1"}


def test_a_thread_expires_after_its_last_write(opened: Open) -> None:
    store, now = opened(), time.time()
    store.write(TENANT, THREAD, {"turn-a": b"1"}, now)
    later = now + TTL_S + 5
    assert store.read(TENANT, THREAD, ["turn-a"], later) == {}
    assert store.sizes(TENANT, THREAD, later) == {}
    assert store.read(TENANT, THREAD, ["turn-a"], now + TTL_S - 5) == {"turn-a": b"1"}
    store.sweep(later)
    assert store.read(TENANT, THREAD, ["turn-a"], now) == {}


def test_many_names_are_read_at_once(opened: Open) -> None:
    store, now = opened(), time.time()
    records = {f"turn-{number:024x}": b"%d" % number for number in range(40)}
    store.write(TENANT, THREAD, records, now)
    assert store.read(TENANT, THREAD, [*records, *map(str, range(1200))], now) == records


def test_after_a_sweep_a_tenant_has_its_newest_threads(opened: Open) -> None:
    size = 1000 + RECORD_BYTES
    store, now = opened(3 * size), time.time()
    for number in range(5):
        store.write(TENANT, thread(number), {"turn-a": bytes(1000)}, now + number)
        time.sleep(0.02)  # objects have the time of the folder
    store.write(OTHER, THREAD, {"turn-a": b"1"}, now)
    store.sweep(now + 5)
    left = [number for number in range(5) if store.sizes(TENANT, thread(number), now + 5)]
    assert left == [2, 3, 4]
    assert store.sizes(OTHER, THREAD, now + 5)


# SQLite


def test_a_write_makes_room_at_once(tmp_path: Path) -> None:
    size = 1000 + RECORD_BYTES
    store = SqliteStore(tmp_path, TTL_S, 3 * size)
    for number in range(5):
        store.write(TENANT, thread(number), {"turn-a": bytes(1000)}, 1.0 + number)
    store.write(TENANT, thread(2), {"turn-a": b"small"}, 7.0)  # used last, and smaller now
    store.write(TENANT, thread(5), {"turn-a": bytes(1000)}, 8.0)
    left = [number for number in range(6) if store.sizes(TENANT, thread(number), 9.0)]
    assert left == [2, 4, 5]


def test_a_thread_that_alone_exceeds_the_limit_is_refused(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path, TTL_S, 2000)
    store.write(TENANT, THREAD, {"turn-a": bytes(1000)}, 1.0)
    store.write(TENANT, thread(1), {"turn-a": bytes(100)}, 1.0)
    with pytest.raises(ThreadFullError):
        store.write(TENANT, THREAD, {"turn-b": bytes(1000)}, 2.0)
    assert store.sizes(TENANT, THREAD, 2.0) == {"turn-a": 1000}
    assert store.sizes(TENANT, thread(1), 2.0) == {"turn-a": 100}


@pytest.mark.parametrize("seed", range(5))
def test_the_counted_bytes_are_those_of_the_records(tmp_path: Path, seed: int) -> None:
    """Whatever was written, replaced, removed, expired and evicted."""
    choice, store = random.Random(seed), SqliteStore(tmp_path, TTL_S, 20_000)
    now = 0.0
    for _ in range(300):
        now += choice.expovariate(1 / 5)
        of = choice.choice((TENANT, OTHER)), thread(choice.randrange(12))
        names = [f"turn-{choice.randrange(6)}" for _ in range(choice.randrange(1, 4))]
        kind = choice.random()
        if kind < 0.7:
            store.write(*of, {name: bytes(choice.randrange(1500)) for name in names}, now)
        elif kind < 0.9:
            store.remove(*of, names)
        else:
            store.sweep(now)
    connection = store._connection
    assert connection is not None
    counted = dict(connection.execute("SELECT id, bytes FROM threads"))
    real = dict(
        connection.execute(
            "SELECT thread, SUM(length(data) + ?) FROM records GROUP BY thread", (RECORD_BYTES,)
        )
    )
    assert counted == real
    totals = dict(connection.execute("SELECT tenant, SUM(bytes) FROM threads GROUP BY tenant"))
    assert dict(connection.execute("SELECT * FROM tenants")) == totals
    assert all(total <= 20_000 for total in totals.values())


def test_a_sweep_takes_a_short_time_and_says_whether_there_is_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite_store, "EXPIRED_AT_ONCE", 2)
    store = SqliteStore(tmp_path, TTL_S, 100_000)
    for number in range(5):
        store.write(TENANT, thread(number), {"turn-a": b"1"}, 1.0)
    store.write(OTHER, THREAD, {"turn-a": b"1"}, 2.0 + TTL_S)
    assert [store.sweep(1.0 + TTL_S) for _ in range(4)] == [True, True, False, False]
    assert store.sizes(OTHER, THREAD, 2.0 + TTL_S)


def test_only_its_owner_may_read_the_file(tmp_path: Path) -> None:
    SqliteStore(tmp_path / "new" / "folder", TTL_S, 1000)
    assert (tmp_path / "new" / "folder" / FILE).stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "new" / "folder").stat().st_mode & 0o777 == 0o700


def test_two_stores_share_a_file(tmp_path: Path) -> None:
    one, two = (SqliteStore(tmp_path, TTL_S, 100_000) for _ in range(2))
    one.write(TENANT, THREAD, {"turn-a": b"1"}, 1.0)
    two.write(TENANT, THREAD, {"turn-b": b"2"}, 1.0)
    assert one.read(TENANT, THREAD, ["turn-a", "turn-b"], 1.0) == {"turn-a": b"1", "turn-b": b"2"}


def test_a_locked_file_is_an_error_and_then_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite_store, "BUSY_S", 0.05)
    store = SqliteStore(tmp_path, TTL_S, 100_000)
    store.write(TENANT, THREAD, {"turn-a": b"1"}, 1.0)
    other = sqlite3.connect(tmp_path / FILE, isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    with pytest.raises(StoreError, match="locked"):
        store.write(TENANT, THREAD, {"turn-b": b"2"}, 1.0)
    assert store.read(TENANT, THREAD, ["turn-a"], 1.0) == {"turn-a": b"1"}
    other.execute("ROLLBACK")
    store.write(TENANT, THREAD, {"turn-b": b"2"}, 1.0)
    assert store.read(TENANT, THREAD, ["turn-b"], 1.0) == {"turn-b": b"2"}


def test_a_full_disk_is_an_error_and_leaves_what_there_is(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path, TTL_S, 100_000_000)
    store.write(TENANT, THREAD, {"turn-a": b"1"}, 1.0)
    assert store._connection is not None
    [pages] = store._connection.execute("PRAGMA page_count").fetchone()
    store._connection.execute(f"PRAGMA max_page_count={pages + 10}").fetchone()
    with pytest.raises(StoreError, match="full"):
        store.write(TENANT, THREAD, {"turn-b": bytes(1_000_000)}, 1.0)
    assert store.read(TENANT, THREAD, ["turn-a", "turn-b"], 1.0) == {"turn-a": b"1"}
    store.write(TENANT, THREAD, {"turn-c": b"3"}, 1.0)


@pytest.mark.parametrize("where", ["header", "middle"])
def test_a_damaged_file_is_set_aside_and_a_new_one_begun(tmp_path: Path, where: str) -> None:
    store = SqliteStore(tmp_path, TTL_S, 10_000_000)
    for number in range(50):
        store.write(TENANT, thread(number), {"turn-a": bytes(2000)}, 1.0)
    store.close()
    file = tmp_path / FILE
    data = bytearray(file.read_bytes())
    start, end = (0, 100) if where == "header" else (4096, len(data))
    data[start:end] = b"\xff" * (end - start)
    file.write_bytes(data)
    again = SqliteStore(tmp_path, TTL_S, 10_000_000)
    assert again.read(TENANT, thread(1), ["turn-a"], 1.0) == {}
    again.write(TENANT, THREAD, {"turn-a": b"1"}, 1.0)
    assert again.read(TENANT, THREAD, ["turn-a"], 1.0) == {"turn-a": b"1"}
    assert file.with_suffix(".damaged").exists()


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError):
        SqliteStore(tmp_path / "file" / "folder", TTL_S, 1000)


WRITER = """
import sys
from pathlib import Path
from headrace.gateway.kept_records.sqlite_store import SqliteStore
store = SqliteStore(Path(sys.argv[1]), 1000.0, 1 << 30)
for number in range(1 << 30):
    records = {f"turn-{number}": b"x" * 3000, f"response-{number}": b"y" * 3000}
    store.write("a" * 32, "0" * 16, records, 1.0)
    print(number, flush=True)
"""


@pytest.mark.slow
def test_a_killed_writer_leaves_each_turn_whole_or_not_at_all(tmp_path: Path) -> None:
    """Every turn that was reported as written is there, with both of its records."""
    wait_s = random.Random(1)
    for kill in range(8):
        folder = tmp_path / str(kill % 4)
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(folder)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        assert writer.stdout is not None
        writer.stdout.readline()
        time.sleep(wait_s.uniform(0.0, 0.05))
        writer.send_signal(signal.SIGKILL)
        told = [int(line) for line in writer.stdout if line.strip()]
        writer.stdout.close()
        writer.wait()
        known = SqliteStore(folder, 1000.0, 1 << 30).sizes(TENANT, THREAD, 1.0)
        turns = {name.partition("-")[2] for name in known if name.startswith("turn-")}
        responses = {name.partition("-")[2] for name in known if name.startswith("response-")}
        assert turns == responses
        assert turns >= {str(number) for number in told}


# Objects


def test_a_tenants_oldest_threads_go_first() -> None:
    threads = [ListedThread(float(age), 10, [str(age)]) for age in (3, 1, 4, 2, 5)]
    assert sorted(surplus(threads, 0.0, 30)) == ["1", "2"]
    assert sorted(surplus(threads, 1.0, 50)) == ["1"]
    assert surplus(threads, 0.0, 50) == []


def test_the_newest_thread_stays_however_large() -> None:
    threads = [ListedThread(2.0, 100, ["new"]), ListedThread(1.0, 1, ["old"])]
    assert surplus(threads, 0.0, 50) == ["old"]


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "objects").write_text("")
    with pytest.raises(StoreError):
        ObjectRecordStore(f"file://{tmp_path}/objects", {}, TTL_S, 1000).write(
            TENANT, THREAD, {"turn-a": b"1"}, 1.0
        )


# Encryption


def test_a_record_opens_only_in_its_own_place() -> None:
    cipher = RecordCipher(b"s" * 16)
    sealed = cipher.seal("a", THREAD, "turn-a", b"text")
    assert cipher.open("a", THREAD, "turn-a", sealed) == b"text"
    assert RecordCipher(b"s" * 16).open("a", THREAD, "turn-a", sealed) == b"text"
    for tenant, thread_, name in (
        ("b", THREAD, "turn-a"),
        (None, THREAD, "turn-a"),
        ("a", thread(1), "turn-a"),
        ("a", THREAD, "turn-b"),
    ):
        with pytest.raises(DamagedRecordError):
            cipher.open(tenant, thread_, name, sealed)
    with pytest.raises(DamagedRecordError):
        RecordCipher(b"t" * 16).open("a", THREAD, "turn-a", sealed)


def test_any_flipped_bit_and_any_cut_is_found() -> None:
    cipher = RecordCipher(b"s" * 16)
    sealed = cipher.seal("a", THREAD, "turn-a", b"text")
    for bit in range(8 * len(sealed)):
        wrong = bytearray(sealed)
        wrong[bit // 8] ^= 1 << bit % 8
        with pytest.raises(DamagedRecordError, match=f"{THREAD}/turn-a"):
            cipher.open("a", THREAD, "turn-a", bytes(wrong))
    for size in range(len(sealed)):
        with pytest.raises(DamagedRecordError):
            cipher.open("a", THREAD, "turn-a", sealed[:size])


def test_neither_text_nor_tenant_can_be_read_in_the_store(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path, TTL_S, 1_000_000)
    state = TenantState(store, RecordCipher(b"s" * 16), "tenant-of-the-test")
    state.create_conversation({"key": "a-secret-value"}, [{"role": "user", "content": "my-text"}])
    store.close()
    written = b"".join(file.read_bytes() for file in tmp_path.iterdir())
    for word in (b"a-secret-value", b"my-text", b"tenant-of-the-test", b"s" * 16):
        assert word not in written


def test_keys_of_many_tenants_do_not_pile_up() -> None:
    cipher = RecordCipher(b"s" * 16)
    tags = [cipher.tag(f"tenant-{number}") for number in range(1100)]
    assert len(set(tags)) == 1100 and cipher._of.cache_info().currsize == 1024
    assert cipher.tag("tenant-0") == tags[0]


def test_a_short_secret_is_refused() -> None:
    with pytest.raises(ValueError, match="16 bytes"):
        RecordCipher(b"s" * 15)


def test_a_damaged_record_is_named_and_nothing_is_made_of_it(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path, TTL_S, 1_000_000)
    state = TenantState(store, RecordCipher(b"s" * 16), None)
    made = state.create_conversation({}, [])
    assert store._connection is not None
    store._connection.execute("UPDATE records SET data = zeroblob(length(data))")
    with pytest.raises(DamagedRecordError, match=made["id"][5:21]):
        state.conversation(made["id"])
