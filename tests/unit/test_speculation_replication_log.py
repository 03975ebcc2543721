"""Batches between replicas: sending, applying and refusing segments."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from benchmarks.draft_memory.one_row import OneRowMemory
from headrace_decode.speculative.replication import replication_log
from headrace_decode.speculative.replication.replication_log import ReplicationLog
from headrace_decode.speculative.replication.segment_batch import (
    CorruptBatchError,
    SegmentBatch,
    SegmentRecord,
    pack,
)
from headrace_decode.speculative.retrieval.draft_memory import MemorySettings, tenant_key

MIB = 1 << 20


def run(start: int, count: int) -> NDArray[np.int32]:
    return np.arange(start, start + count, dtype=np.int32)


def new(replica: int, now_s: float = 1000.0) -> OneRowMemory:
    settings = MemorySettings(capacity_bytes=2 * MIB, replica=replica, model=b"m", tokenizer=b"t")
    return OneRowMemory(settings, lambda: now_s)


def answered(memory: OneRowMemory, tokens: NDArray[np.int32], tenant: str) -> None:
    handle = memory.open_request("past", run(7, 1), tenant)
    memory.extend(handle, tokens)
    memory.close_request(handle)


def drafted(memory: OneRowMemory, prompt: NDArray[np.int32], tenant: str) -> list[int]:
    handle = memory.open_request("now", prompt, tenant)
    tokens = memory.draft(handle, 4).tokens.tolist()
    memory.close_request(handle, keep=False)
    return tokens


def next_batch(log: ReplicationLog, most_bytes: int = MIB) -> bytes:
    """The next batch; nothing if there is none."""
    batch = log.pending_batch(most_bytes)
    return b"" if batch is None else batch[1]


def failed(memory: OneRowMemory, prompt: NDArray[np.int32], tenant: str) -> None:
    handle = memory.open_request("now", prompt, tenant)
    memory.feedback(memory.draft(handle, 4), 4, 0)
    memory.close_request(handle, keep=False)


class TestReplicationLog:
    def test_answers_of_one_replica_are_drafted_by_the_other(self) -> None:
        a, b = new(1), new(2)
        log, other = ReplicationLog(a), ReplicationLog(b)
        answered(a, run(100, 30), "x")
        assert other.apply(next_batch(log), "from a") == 1
        assert drafted(b, run(100, 5), "x") == [105, 106, 107, 108]
        assert drafted(b, run(100, 5), "y") == []
        assert log.pending_batch(MIB) is None

    def test_applying_a_batch_again_changes_nothing(self) -> None:
        a, b = new(1), new(2)
        log, other = ReplicationLog(a), ReplicationLog(b)
        answered(a, run(100, 30), "x")
        data = next_batch(log)
        assert other.apply(data, "from a") == 1
        before = (b.stats(), b.pool.headers.copy())
        assert other.apply(data, "from a") == 0
        assert b.stats() == before[0]
        assert (b.pool.headers == before[1]).all()

    def test_small_reads_bring_the_same_as_one_large(self) -> None:
        a, b = new(1), new(2)
        log, other = ReplicationLog(a), ReplicationLog(b)
        for n in range(10):
            answered(a, run(100 * n, 30), "x")
        batches = 0
        while data := next_batch(log, 1):
            other.apply(data, "from a")
            batches += 1
        assert batches == 10
        assert b.stats()["segments"] == 10

    def test_replica_ids_do_not_depend_on_the_engines_seed(self) -> None:
        numbers = set()
        for _ in range(2):
            np.random.seed(0)
            numbers.add(OneRowMemory(MemorySettings(capacity_bytes=2 * MIB)).replica)
        assert len(numbers) == 2

    def test_applied_segments_are_not_sent_on(self) -> None:
        a, b = new(1), new(2)
        log_a, log_b = ReplicationLog(a), ReplicationLog(b)
        answered(a, run(100, 30), "x")
        log_b.apply(next_batch(log_a), "from a")
        assert log_b.pending_batch(MIB) is None
        log_b.requeue_all()
        assert log_b.pending_batch(MIB) is None

    def test_an_evicted_segment_is_passed_over(self) -> None:
        a = new(1)
        log = ReplicationLog(a)
        answered(a, run(100, 30), "x")
        a.pool.drop(tenant_key("x"))
        assert log.pending_batch(MIB) is None

    def test_a_replica_does_not_apply_its_own_batch(self) -> None:
        a = new(1)
        log = ReplicationLog(a)
        answered(a, run(100, 30), "x")
        assert log.apply(next_batch(log), "own") == 0

    def test_a_corpus_is_sent_whole_when_it_takes_over(self) -> None:
        a, b = new(1), new(2)
        log, other = ReplicationLog(a), ReplicationLog(b)
        a.add_to_corpus("docs", 1, [run(300, 20), run(400, 20)])
        assert log.pending_batch(MIB) is None
        a.activate_corpus("docs", 1)
        assert other.apply(next_batch(log), "from a") == 3
        assert drafted(b, run(300, 5), "anyone") == [305, 306, 307, 308]
        assert drafted(b, run(400, 5), "anyone") == [405, 406, 407, 408]

    def test_a_corpus_that_is_there_already_is_not_put_in_again(self) -> None:
        a, b = new(1), new(2)
        log, other = ReplicationLog(a), ReplicationLog(b)
        for memory in (a, b):
            memory.add_to_corpus("docs", 1, [run(300, 20)])
            memory.activate_corpus("docs", 1, replicate=memory is a)
        other.apply(next_batch(log), "from a")
        assert b.stats()["segments"] == 1

    def test_versions_in_force_only_grow_in_any_order_of_batches(self) -> None:
        a, b, c = new(1), new(2), new(3)
        logs, other = [ReplicationLog(a), ReplicationLog(b)], ReplicationLog(c)
        for version, memory in enumerate((a, b), 1):
            memory.add_to_corpus("docs", version, [run(100 * version, 20)])
            memory.activate_corpus("docs", version)
        for log in reversed(logs):
            other.apply(next_batch(log), "from another")
        assert drafted(c, run(100, 5), "x") == []
        assert drafted(c, run(200, 5), "x") == [205, 206, 207, 208]

    def test_a_dropped_corpus_is_dropped_at_the_others_and_not_sent_to_new_ones(self) -> None:
        a, b, c = new(1), new(2), new(3)
        log, other, late = ReplicationLog(a), ReplicationLog(b), ReplicationLog(c)
        a.add_to_corpus("docs", 1, [run(300, 20)], tenant="x")
        a.activate_corpus("docs", 1, tenant="x")
        other.apply(next_batch(log), "from a")
        a.activate_corpus("docs", 2, tenant="x")
        other.apply(next_batch(log), "from a")
        assert drafted(b, run(300, 5), "x") == []
        log.requeue_all()
        assert late.apply(next_batch(log), "from a") == 1
        assert c.stats()["segments"] == 0

    def test_public_corpora_are_refused_where_they_are_not_allowed(self) -> None:
        a, b = new(1), OneRowMemory(MemorySettings(capacity_bytes=4 * MIB, public_corpora=False))
        log, other = ReplicationLog(a), ReplicationLog(b)
        a.add_to_corpus("docs", 1, [run(300, 20)])
        a.activate_corpus("docs", 1)
        other.apply(next_batch(log), "from a")
        assert b.stats()["segments"] == 0

    @pytest.mark.parametrize("of", ["model", "tokenizer"])
    def test_segments_of_another_model_or_tokenizer_are_refused_and_logged(
        self, of: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        lines: list[str] = []
        monkeypatch.setattr(
            replication_log.logger, "warning", lambda text, *a: lines.append(text % a)
        )
        kind = {"model": b"m", "tokenizer": b"t", of: b"another"}
        settings = MemorySettings(capacity_bytes=2 * MIB, replica=1, **kind)
        a, b = OneRowMemory(settings, lambda: 1000.0), new(2)
        log, other = ReplicationLog(a), ReplicationLog(b)
        answered(a, run(100, 30), "x")
        answered(a, run(200, 30), "x")
        a.add_to_corpus("docs", 1, [run(300, 20)], tenant="x")
        a.activate_corpus("docs", 1, tenant="x")
        other.apply(next_batch(log), "from a")
        assert b.stats()["segments"] == (of == "model"), "a corpus is of no model"
        assert other.incompatible == 3 - (of == "model")
        [line] = lines
        assert f"another {of}" in line and b"another".hex() in line

    def test_a_damaged_batch_is_refused_whole_and_named(self) -> None:
        a, b = new(1), new(2)
        log, other = ReplicationLog(a), ReplicationLog(b)
        answered(a, run(100, 30), "x")
        data = next_batch(log)
        for at in range(len(data)):
            damaged = bytearray(data)
            damaged[at] ^= 1
            with pytest.raises(CorruptBatchError, match="batch 7"):
                other.apply(bytes(damaged), "batch 7")
        with pytest.raises(CorruptBatchError):
            other.apply(data[:-1], "batch 7")
        assert b.stats()["segments"] == 0

    def test_a_reader_too_far_behind_misses_the_oldest(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(replication_log, "MAX_ENTRIES", 4)
        a, b = new(1), new(2)
        log, other = ReplicationLog(a), ReplicationLog(b)
        for n in range(10):
            answered(a, run(100 * n, 30), "x")
        assert other.apply(next_batch(log), "from a") == 4

    def test_partitions_with_pending_entries_are_bounded(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(replication_log, "MAX_ENTRIES", 4)
        a = new(1)
        log = ReplicationLog(a)
        for n in range(10):
            answered(a, run(100 * n, 30), f"tenant {n}")
        assert log.pending == 4

    def test_requeue_all_sends_each_segment_once(self) -> None:
        a, b = new(1), new(2)
        log, other = ReplicationLog(a), ReplicationLog(b)
        answered(a, run(100, 30), "x")
        answered(a, run(200, 30), "y")
        a.add_to_corpus("docs", 1, [run(300, 20)])
        a.activate_corpus("docs", 1)
        first = [next_batch(log) for _ in range(3)]
        answered(a, run(400, 30), "x")
        log.requeue_all()
        assert log.pending == 5
        assert sum(other.apply(next_batch(log), "again") for _ in range(3)) == 5
        assert sum(other.apply(data, "late") for data in first) == 0

    @pytest.mark.parametrize(
        "wrong",
        [
            {"tokens": b"\1\0\0\0"},
            {"tokens": b"\1\0\0\0\1\0\0"},
            {"tokens": b"\xff" * 8},
            {"tokens": b"\0" * 4 * 9000},
            {"source": 3},
            {"corpus": "docs"},
            {"expires_s": 1000.0},
            {"expires_s": float("nan")},
            {"uid": 2**64 - 1, "tokens": b""},
        ],
    )
    def test_invalid_records_are_not_applied(self, wrong: dict[str, Any]) -> None:
        right = {"uid": 5, "created_s": 1.0, "expires_s": 2e9, "version": 0, "source": 2}
        right |= {"corpus": "", "model": b"m", "tokenizer": b"t", "tokens": b"\1\0\0\0" * 2}
        b = new(2)
        for given, kept in ((right | wrong, 0), (right, 1)):
            data = pack(SegmentBatch(1, "tenant", "x", [SegmentRecord(**given)]))
            assert ReplicationLog(b).apply(data, "from a") == kept
        for tenant in ("x", ""):
            odd = pack(SegmentBatch(1, "public", tenant, [SegmentRecord(**(right | {"uid": 6}))]))
            assert ReplicationLog(b).apply(odd, "from a") == 0
