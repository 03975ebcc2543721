"""What is kept of files and batches, in both kinds of stores: leases, results, ends."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.gateway.batches.batch_ids import BATCH, FILE, new_id, new_thread
from headrace.gateway.batches.batch_job import ANSWERED, REFUSED, BatchJob
from headrace.gateway.batches.batch_records import (
    WINDOW_S,
    BatchLease,
    JobEntry,
    LineResult,
    Outcome,
    StoredBatch,
    StoredFile,
)
from headrace.gateway.batches.tenant_batches import TenantBatches
from headrace.gateway.errors import ApiError
from headrace.gateway.kept_records.object_store import ObjectRecordStore
from headrace.gateway.kept_records.record_cipher import GATEWAYS, RecordCipher
from headrace.gateway.kept_records.record_store import RecordStore
from headrace.gateway.kept_records.sqlite_store import SqliteStore
from tests.unit.gateway_fakes import CHAT

TTL_S = 1e6
Open = Callable[..., TenantBatches]


class Clock:
    """Unix seconds that a test moves."""

    def __init__(self) -> None:
        self.now_s = time.time()

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(params=["sqlite", "objects"])
def opened(request: pytest.FixtureRequest, tmp_path: Path, clock: Clock) -> Open:
    """Opens the batches of a tenant at one more gateway."""

    def open_batches(tenant: str | None = "ann") -> TenantBatches:
        store: RecordStore
        if request.param == "sqlite":
            store = SqliteStore(tmp_path, TTL_S, sys.maxsize)
        else:
            store = ObjectRecordStore(f"file://{tmp_path}/objects", {}, TTL_S, sys.maxsize)
        return TenantBatches(store, RecordCipher(b"s" * 16), tenant, clock)

    return open_batches


def add_file(batches: TenantBatches, clock: Clock, **changes: object) -> StoredFile:
    fields = {"created_at": int(clock()), "expires_at": int(clock()) + 3600, **changes}
    file = StoredFile(new_id(FILE), "in.jsonl", "batch", 4, 2, **fields)  # type: ignore[arg-type]
    batches.put_part(file.id, 0, b"ab")
    batches.put_part(file.id, 1, b"cd")
    batches.add_file(file)
    return file


def add_batch(batches: TenantBatches, clock: Clock, **changes: object) -> StoredBatch:
    file = add_file(batches, clock)
    batch = StoredBatch(
        *(new_id(BATCH), file.id, CHAT, b"null", int(clock())),
        *(new_id(FILE), new_id(FILE), new_thread(), 3600),
    )
    batches.create_batch(batch, 10, sys.maxsize, TTL_S)
    return batch


def code_of(error: pytest.ExceptionInfo[ApiError]) -> tuple[int, str | None]:
    return error.value.status, error.value.code


def test_a_file_is_found_by_its_tenant_only(opened: Open, clock: Clock) -> None:
    batches = opened()
    file = add_file(batches, clock)
    assert opened().file(file.id) == file
    assert b"".join(opened().part(file.id, number) for number in range(2)) == b"abcd"
    assert opened().size_bytes() == 4
    for other in (opened("bob"), opened(None)):
        assert not other.files()
        with pytest.raises(ApiError) as caught:
            other.file(file.id)
        assert code_of(caught) == (404, "file_not_found")
        with pytest.raises(ApiError):
            other.part(file.id, 0)


def test_a_file_expires(opened: Open, clock: Clock) -> None:
    batches = opened()
    file, other = add_file(batches, clock), add_file(batches, clock, expires_at=2 * 10**9)
    clock.now_s += 3601
    with pytest.raises(ApiError):
        batches.file(file.id)
    assert batches.files() == [other]


def test_the_input_of_a_batch_is_kept_as_long_as_the_batch(opened: Open, clock: Clock) -> None:
    batch = add_batch(opened(), clock)
    clock.now_s += WINDOW_S
    assert opened().part(batch.input_file_id, 1) == b"cd"
    assert opened().file(batch.input_file_id)


def test_one_gateway_has_the_lease_until_it_expires(opened: Open, clock: Clock) -> None:
    one, two = opened(), opened()
    batch = add_batch(one, clock)
    assert one.acquire(batch.id, "one", 10.0) == 1
    assert two.acquire(batch.id, "two", 10.0) is None
    assert one.beat(batch.id, 1, BatchLease("one", clock() + 10, 3), None).has_lease
    clock.now_s += 9
    assert two.acquire(batch.id, "two", 10.0) is None
    found = two.lease(batch.id)
    assert found is not None and (found.owner, found.lines) == ("one", 3)
    clock.now_s += 2
    assert two.acquire(batch.id, "two", 10.0) == 2
    assert not one.beat(batch.id, 1, BatchLease("one", clock() + 10), None).has_lease
    assert one.acquire(batch.id, "one", 10.0) is None


def test_a_lease_that_was_given_back_is_free_at_once(opened: Open, clock: Clock) -> None:
    one, two = opened(), opened()
    batch = add_batch(one, clock)
    assert one.acquire(batch.id, "one", 10.0) == 1
    one.beat(batch.id, 1, BatchLease("one", 0.0), None)
    assert two.acquire(batch.id, "two", 10.0) == 2


def test_a_line_keeps_its_first_result(opened: Open, clock: Clock) -> None:
    batches = opened()
    batch = add_batch(batches, clock)
    first, second = LineResult(ANSWERED, b"first\n"), LineResult(REFUSED, b"second\n")
    assert batches.add_result(batch, 7, first) == first
    assert opened().add_result(batch, 7, second) == first
    assert opened().add_results(batch, {7: second, 8: second}) == {7: ANSWERED, 8: REFUSED}
    assert batches.results(batch, [7, 8, 9]) == {7: first, 8: second}
    assert set(batches.result_sizes(batch)) == {7, 8}


def test_a_cancelled_batch_tells_the_gateway_that_runs_it(opened: Open, clock: Clock) -> None:
    batches = opened()
    batch = add_batch(batches, clock)
    batches.acquire(batch.id, "one", 10.0)
    assert opened().cancel(batch.id).document()["status"] == "cancelling"
    at_s = int(clock())
    clock.now_s += 5
    opened().cancel(batch.id)
    beat = batches.beat(batch.id, 1, BatchLease("one", clock() + 10), None)
    assert (beat.has_lease, beat.cancelled_at) == (True, at_s)


def test_a_batch_has_one_end(opened: Open, clock: Clock) -> None:
    batches = opened()
    batch = add_batch(batches, clock)
    batches.acquire(batch.id, "one", 10.0)
    batches.add_result(batch, 0, LineResult(ANSWERED, b"x\n"))
    job = BatchJob()
    job.begin(1, 1)
    job.mark(0, ANSWERED)
    job.finalize(2)
    job.end(3)
    batches.end(batch.id, Outcome(job.state(), has_output=True))
    failed = BatchJob()
    failed.fail([], 4)
    opened().end(batch.id, Outcome(failed.state()))
    with pytest.raises(ApiError) as caught:
        batches.delete_file(batch.input_file_id)
    assert code_of(caught) == (409, "file_in_use")
    batches.clean(batch)
    document = opened().view(batch.id).document()
    assert (document["status"], document["output_file_id"]) == ("completed", batch.output_id)
    assert not batches.result_sizes(batch) and batches.lease(batch.id) is None
    with pytest.raises(ApiError) as caught:
        batches.cancel(batch.id)
    assert code_of(caught) == (409, "batch_ended")
    batches.delete_file(batch.input_file_id)
    assert [each.id for each in batches.batches()] == [batch.id]


def test_a_batch_that_nobody_lists_does_not_count_for_ever(opened: Open, clock: Clock) -> None:
    batches = opened()
    add_batch(batches, clock)
    file = add_file(batches, clock, expires_at=2 * 10**9)
    more = StoredBatch(
        *(new_id(BATCH), file.id, CHAT, b"null", int(clock())),
        *(new_id(FILE), new_id(FILE), new_thread(), 3600),
    )
    with pytest.raises(ApiError) as caught:
        batches.create_batch(more, 1, sys.maxsize, TTL_S)
    assert code_of(caught) == (429, "too_many_batches")
    clock.now_s += 2 * WINDOW_S + 1
    assert batches.create_batch(more, 1, sys.maxsize, TTL_S).document()["id"] == more.id


def test_gateways_find_the_unfinished_batches_of_all_tenants(opened: Open) -> None:
    gateways = opened(GATEWAYS)
    entries = [JobEntry(new_id(BATCH), tenant, "") for tenant in ("ann", "bob", None)]
    for entry in entries:
        gateways.add_job(entry)
    found = {entry.batch_id: entry for entry in opened(GATEWAYS).jobs()}
    assert found == {entry.batch_id: entry for entry in entries}
    gateways.remove_job(entries[0].batch_id)
    assert len(opened(GATEWAYS).jobs()) == 2
    assert not opened("ann").jobs()
