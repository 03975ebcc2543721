"""Snapshots and the log between replicas: what arrives, what is refused, and once is enough."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from headrace_decode.speculation import exchange, snapshot
from headrace_decode.speculation.exchange import Exchange
from headrace_decode.speculation.memory import PUBLIC_KEY, Memory, Settings, tenant_key
from headrace_decode.speculation.record import (
    DamagedError,
    FaredRecord,
    decode_batch,
    encode_batch,
    encode_record,
)

MIB = 1 << 20


def run(start: int, count: int) -> NDArray[np.int32]:
    return np.arange(start, start + count, dtype=np.int32)


def new(replica: int, now_s: float = 1000.0) -> Memory:
    settings = Settings(capacity_bytes=2 * MIB, replica=replica, model=b"m", tokenizer=b"t")
    return Memory(settings, lambda: now_s)


def answered(memory: Memory, tokens: NDArray[np.int32], tenant: str) -> None:
    handle = memory.open_request("past", run(7, 1), tenant, tag="code")
    memory.extend(handle, tokens)
    memory.close_request(handle)


def drafted(memory: Memory, prompt: NDArray[np.int32], tenant: str) -> list[int]:
    handle = memory.open_request("now", prompt, tenant)
    tokens = memory.draft(handle, 4).tokens.tolist()
    memory.close_request(handle, keep=False)
    return tokens


def failed(memory: Memory, prompt: NDArray[np.int32], tenant: str) -> None:
    handle = memory.open_request("now", prompt, tenant)
    memory.feedback(handle, memory.draft(handle, 4), 4, 0)
    memory.close_request(handle, keep=False)


@pytest.fixture
def full() -> Memory:
    memory = new(1)
    answered(memory, run(100, 30), "a")
    answered(memory, run(200, 30), "b")
    memory.add_to_corpus("docs", 3, [run(300, 30)], tag="prose")
    memory.flip("docs", 3)
    return memory


class TestSnapshot:
    def test_a_restored_memory_drafts_as_the_saved_one_did(self, full: Memory) -> None:
        failed(full, run(100, 5), "a")
        fresh = new(2)
        outcome = snapshot.restore(fresh, snapshot.save(full), "file")
        assert (outcome.segments, outcome.left_out, outcome.damaged) == (3, 0, ())
        for tenant, start in (("a", 100), ("b", 200), ("a", 300), ("b", 300)):
            assert drafted(fresh, run(start, 5), tenant) == run(start + 5, 4).tolist()
        assert drafted(fresh, run(100, 5), "b") == []
        assert (fresh.calibration.counts == full.calibration.counts).all()
        assert fresh.pool.headers["refused"].sum() == 1
        assert snapshot.save(fresh) == snapshot.save(full)

    def test_expired_segments_stay_behind(self, full: Memory) -> None:
        late = new(2, now_s=1000.0 + 86400.0)
        outcome = snapshot.restore(late, snapshot.save(full), "file")
        assert (outcome.segments, outcome.left_out) == (1, 2)

    def test_an_empty_memory_has_a_snapshot(self) -> None:
        assert snapshot.restore(new(2), snapshot.save(new(1)), "file").segments == 0

    def test_damaged_tokens_cost_their_segment_which_is_named(self, full: Memory) -> None:
        data = bytearray(snapshot.save(full))
        data[-5] ^= 1
        fresh = new(2)
        outcome = snapshot.restore(fresh, bytes(data), "some/file")
        assert outcome.segments == 2
        (line,) = outcome.damaged
        assert line.startswith("some/file: segment 2 (30 tokens of public ''")

    def test_any_other_damage_refuses_it_whole(self, full: Memory) -> None:
        data = snapshot.save(full)
        tokens = 2 * 31 * 4 + 30 * 4
        for at in [*range(0, 40), *range(60, len(data) - tokens, 997), len(data) - tokens - 1]:
            damaged = bytearray(data)
            damaged[at] ^= 4
            fresh = new(2)
            with pytest.raises(DamagedError, match="some/file"):
                snapshot.restore(fresh, bytes(damaged), "some/file")
            assert fresh.stats()["segments"] == 0

    @pytest.mark.parametrize("keep", [0, 3, 20, 200, -1])
    def test_a_truncated_one_is_refused(self, full: Memory, keep: int) -> None:
        with pytest.raises(DamagedError):
            snapshot.restore(new(2), snapshot.save(full)[:keep], "file")


class TestExchange:
    def test_what_one_replica_learned_the_other_drafts(self) -> None:
        a, b = new(1), new(2)
        log, other = Exchange(a), Exchange(b)
        answered(a, run(100, 30), "x")
        data, after = log.read(tenant_key("x"), 0, MIB)
        assert other.absorb(data, "from a") == 1
        assert drafted(b, run(100, 5), "x") == [105, 106, 107, 108]
        assert drafted(b, run(100, 5), "y") == []
        assert log.read(tenant_key("x"), after, MIB) == (b"", after)

    def test_absorbing_again_changes_nothing(self) -> None:
        a, b = new(1), new(2)
        log, other = Exchange(a), Exchange(b)
        answered(a, run(100, 30), "x")
        failed(a, run(100, 5), "x")
        log.collect()
        data, _ = log.read(tenant_key("x"), 0, MIB)
        assert other.absorb(data, "from a") == 2
        before = (b.stats(), b.pool.headers.copy())
        assert other.absorb(data, "from a") == 0
        assert b.stats() == before[0]
        assert (b.pool.headers == before[1]).all()

    def test_small_reads_bring_the_same_as_one_large(self) -> None:
        a, b = new(1), new(2)
        log, other = Exchange(a), Exchange(b)
        for n in range(10):
            answered(a, run(100 * n, 30), "x")
        after, batches = 0, 0
        while True:
            data, after = log.read(tenant_key("x"), after, 1)
            if not data:
                break
            other.absorb(data, "from a")
            batches += 1
        assert batches == 10
        assert b.stats()["segments"] == 10

    def test_feedback_on_anothers_segment_reaches_it_and_is_counted_once(self) -> None:
        a, b = new(1), new(2)
        log_a, log_b = Exchange(a), Exchange(b)
        answered(a, run(100, 30), "x")
        log_b.absorb(log_a.read(tenant_key("x"), 0, MIB)[0], "from a")
        for _ in range(3):
            failed(b, run(100, 5), "x")
        log_b.collect()
        data, after = log_b.read(tenant_key("x"), 0, MIB)
        log_a.absorb(data, "from b")
        assert a.pool.headers["refused"].sum() == 3
        log_a.collect()
        assert log_a.read(tenant_key("x"), 1, MIB)[0] == b"", "nothing is told back"
        failed(b, run(100, 5), "x")
        log_b.collect()
        log_a.absorb(log_b.read(tenant_key("x"), after, MIB)[0], "from b")
        assert a.pool.headers["refused"].sum() == 4

    def test_how_drafts_fared_is_told_in_their_own_partition(self) -> None:
        a = new(1)
        log = Exchange(a)
        for tenant, start in (("x", 100), ("y", 200)):
            answered(a, run(start, 30), tenant)
            failed(a, run(start, 5), tenant)
        assert log.logged == 2
        log.collect()
        assert log.heads() == {tenant_key("x"): 2, tenant_key("y"): 2}
        log.collect()
        assert log.logged == 4, "told once"
        batch = decode_batch(log.read(tenant_key("y"), 1, MIB)[0], "y")
        [(number, record)] = batch.records
        assert (batch.tenant, number) == ("y", 2)
        [header] = a.pool.segments(a.pool.find(tenant_key("y")) or 0)
        assert record == FaredRecord(((int(a.pool.headers[header]["uid"]), 0, 1),))

    def test_only_the_partition_that_it_is_told_in_is_touched(self) -> None:
        a, b = new(1), new(2)
        log, other = Exchange(a), Exchange(b)
        answered(a, run(100, 30), "x")
        other.absorb(log.read(tenant_key("x"), 0, MIB)[0], "from a")
        uid = int(b.pool.headers["uid"].max())
        lie = encode_batch(1, "tenant", "y", [encode_record(1, FaredRecord(((uid, 0, 9),)))])
        other.absorb(lie, "from somebody")
        assert b.pool.headers["refused"].sum() == 0

    def test_replicas_have_numbers_of_their_own_whatever_the_engine_seeds(self) -> None:
        numbers = set()
        for _ in range(2):
            np.random.seed(0)
            numbers.add(Memory(Settings(capacity_bytes=2 * MIB)).replica)
        assert len(numbers) == 2

    def test_what_was_absorbed_is_not_logged_again(self) -> None:
        a, b = new(1), new(2)
        log_a, log_b = Exchange(a), Exchange(b)
        answered(a, run(100, 30), "x")
        log_b.absorb(log_a.read(tenant_key("x"), 0, MIB)[0], "from a")
        assert log_b.read(tenant_key("x"), 0, MIB) == (b"", 0)

    def test_an_evicted_segment_is_passed_over(self) -> None:
        a = new(1)
        log = Exchange(a)
        answered(a, run(100, 30), "x")
        a.drop_tenant("x")
        assert log.read(tenant_key("x"), 0, MIB) == (b"", 1)

    def test_a_replica_does_not_absorb_its_own_log(self) -> None:
        a = new(1)
        log = Exchange(a)
        answered(a, run(100, 30), "x")
        assert log.absorb(log.read(tenant_key("x"), 0, MIB)[0], "own") == 0

    def test_a_corpus_is_logged_whole_when_it_takes_over(self) -> None:
        a, b = new(1), new(2)
        log, other = Exchange(a), Exchange(b)
        a.add_to_corpus("docs", 1, [run(300, 20), run(400, 20)])
        assert log.read(PUBLIC_KEY, 0, MIB) == (b"", 0)
        a.flip("docs", 1)
        data, after = log.read(PUBLIC_KEY, 0, MIB)
        assert (other.absorb(data, "from a"), after) == (3, 3)
        assert drafted(b, run(300, 5), "anyone") == [305, 306, 307, 308]
        assert drafted(b, run(400, 5), "anyone") == [405, 406, 407, 408]

    def test_a_corpus_that_is_there_already_is_not_put_in_again(self) -> None:
        a, b = new(1), new(2)
        log, other = Exchange(a), Exchange(b)
        for memory in (a, b):
            memory.add_to_corpus("docs", 1, [run(300, 20)])
            memory.flip("docs", 1, tell=memory is a)
        other.absorb(log.read(PUBLIC_KEY, 0, MIB)[0], "from a")
        assert b.stats()["segments"] == 1

    def test_versions_in_force_only_grow_whatever_order_logs_are_read_in(self) -> None:
        a, b, c = new(1), new(2), new(3)
        logs, other = [Exchange(a), Exchange(b)], Exchange(c)
        for version, memory in enumerate((a, b), 1):
            memory.add_to_corpus("docs", version, [run(100 * version, 20)])
            memory.flip("docs", version)
        for log in reversed(logs):
            other.absorb(log.read(PUBLIC_KEY, 0, MIB)[0], "from another")
        assert drafted(c, run(100, 5), "x") == []
        assert drafted(c, run(200, 5), "x") == [205, 206, 207, 208]

    def test_a_dropped_corpus_is_dropped_at_the_others_and_not_told_to_new_ones(self) -> None:
        a, b, c = new(1), new(2), new(3)
        log, other, late = Exchange(a), Exchange(b), Exchange(c)
        a.add_to_corpus("docs", 1, [run(300, 20)], tenant="x")
        a.flip("docs", 1, tenant="x")
        data, after = log.read(tenant_key("x"), 0, MIB)
        other.absorb(data, "from a")
        a.flip("docs", 2, tenant="x")
        other.absorb(log.read(tenant_key("x"), after, MIB)[0], "from a")
        assert drafted(b, run(300, 5), "x") == []
        assert late.absorb(log.read(tenant_key("x"), 0, MIB)[0], "from a") == 2
        assert c.stats()["segments"] == 0

    def test_what_is_for_all_is_refused_where_nothing_may_be(self) -> None:
        a, b = new(1), Memory(Settings(capacity_bytes=4 * MIB, for_all=frozenset()))
        log, other = Exchange(a), Exchange(b)
        a.add_to_corpus("docs", 1, [run(300, 20)])
        a.flip("docs", 1)
        other.absorb(log.read(PUBLIC_KEY, 0, MIB)[0], "from a")
        restored = snapshot.restore(b, snapshot.save(a), "file")
        assert (restored.segments, b.stats()["segments"]) == (0, 0)

    def test_a_damaged_batch_is_refused_whole_and_named(self) -> None:
        a, b = new(1), new(2)
        log, other = Exchange(a), Exchange(b)
        answered(a, run(100, 30), "x")
        data, _ = log.read(tenant_key("x"), 0, MIB)
        for at in range(len(data)):
            damaged = bytearray(data)
            damaged[at] ^= 1
            with pytest.raises(DamagedError, match="batch 7"):
                other.absorb(bytes(damaged), "batch 7")
        with pytest.raises(DamagedError):
            other.absorb(data[:-1], "batch 7")
        assert b.stats()["segments"] == 0

    def test_a_reader_too_far_behind_misses_the_oldest(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(exchange, "MOST_ENTRIES", 4)
        a, b = new(1), new(2)
        log, other = Exchange(a), Exchange(b)
        for n in range(10):
            answered(a, run(100 * n, 30), "x")
        data, after = log.read(tenant_key("x"), 0, MIB)
        assert (other.absorb(data, "from a"), after) == (4, 10)
