"""What replicas tell each other: what arrives, what is refused, and once is enough."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from benchmarks.drafting.one_row import OneRowMemory as Memory
from headrace_decode.speculative.retrieval.draft_memory import Settings, tenant_key
from headrace_decode.speculative.sharing import exchange
from headrace_decode.speculative.sharing.exchange import Exchange
from headrace_decode.speculative.sharing.record import (
    Batch,
    DamagedError,
    SegmentRecord,
    pack,
)

MIB = 1 << 20


def run(start: int, count: int) -> NDArray[np.int32]:
    return np.arange(start, start + count, dtype=np.int32)


def new(replica: int, now_s: float = 1000.0) -> Memory:
    settings = Settings(capacity_bytes=2 * MIB, replica=replica, model=b"m", tokenizer=b"t")
    return Memory(settings, lambda: now_s)


def answered(memory: Memory, tokens: NDArray[np.int32], tenant: str) -> None:
    handle = memory.open_request("past", run(7, 1), tenant)
    memory.extend(handle, tokens)
    memory.close_request(handle)


def drafted(memory: Memory, prompt: NDArray[np.int32], tenant: str) -> list[int]:
    handle = memory.open_request("now", prompt, tenant)
    tokens = memory.draft(handle, 4).tokens.tolist()
    memory.close_request(handle, keep=False)
    return tokens


def told(log: Exchange, most_bytes: int = MIB) -> bytes:
    """The next batch; nothing if there is none."""
    batch = log.tell(most_bytes)
    return b"" if batch is None else batch[1]


def failed(memory: Memory, prompt: NDArray[np.int32], tenant: str) -> None:
    handle = memory.open_request("now", prompt, tenant)
    memory.feedback(memory.draft(handle, 4), 4, 0)
    memory.close_request(handle, keep=False)


class TestExchange:
    def test_what_one_replica_learned_the_other_drafts(self) -> None:
        a, b = new(1), new(2)
        log, other = Exchange(a), Exchange(b)
        answered(a, run(100, 30), "x")
        assert other.absorb(told(log), "from a") == 1
        assert drafted(b, run(100, 5), "x") == [105, 106, 107, 108]
        assert drafted(b, run(100, 5), "y") == []
        assert log.tell(MIB) is None

    def test_absorbing_again_changes_nothing(self) -> None:
        a, b = new(1), new(2)
        log, other = Exchange(a), Exchange(b)
        answered(a, run(100, 30), "x")
        data = told(log)
        assert other.absorb(data, "from a") == 1
        before = (b.stats(), b.pool.headers.copy())
        assert other.absorb(data, "from a") == 0
        assert b.stats() == before[0]
        assert (b.pool.headers == before[1]).all()

    def test_small_reads_bring_the_same_as_one_large(self) -> None:
        a, b = new(1), new(2)
        log, other = Exchange(a), Exchange(b)
        for n in range(10):
            answered(a, run(100 * n, 30), "x")
        batches = 0
        while data := told(log, 1):
            other.absorb(data, "from a")
            batches += 1
        assert batches == 10
        assert b.stats()["segments"] == 10

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
        log_b.absorb(told(log_a), "from a")
        assert log_b.tell(MIB) is None
        log_b.tell_again()
        assert log_b.tell(MIB) is None

    def test_an_evicted_segment_is_passed_over(self) -> None:
        a = new(1)
        log = Exchange(a)
        answered(a, run(100, 30), "x")
        a.pool.drop(tenant_key("x"))
        assert log.tell(MIB) is None

    def test_a_replica_does_not_absorb_its_own_log(self) -> None:
        a = new(1)
        log = Exchange(a)
        answered(a, run(100, 30), "x")
        assert log.absorb(told(log), "own") == 0

    def test_a_corpus_is_logged_whole_when_it_takes_over(self) -> None:
        a, b = new(1), new(2)
        log, other = Exchange(a), Exchange(b)
        a.add_to_corpus("docs", 1, [run(300, 20), run(400, 20)])
        assert log.tell(MIB) is None
        a.flip("docs", 1)
        assert other.absorb(told(log), "from a") == 3
        assert drafted(b, run(300, 5), "anyone") == [305, 306, 307, 308]
        assert drafted(b, run(400, 5), "anyone") == [405, 406, 407, 408]

    def test_a_corpus_that_is_there_already_is_not_put_in_again(self) -> None:
        a, b = new(1), new(2)
        log, other = Exchange(a), Exchange(b)
        for memory in (a, b):
            memory.add_to_corpus("docs", 1, [run(300, 20)])
            memory.flip("docs", 1, tell=memory is a)
        other.absorb(told(log), "from a")
        assert b.stats()["segments"] == 1

    def test_versions_in_force_only_grow_whatever_order_logs_are_read_in(self) -> None:
        a, b, c = new(1), new(2), new(3)
        logs, other = [Exchange(a), Exchange(b)], Exchange(c)
        for version, memory in enumerate((a, b), 1):
            memory.add_to_corpus("docs", version, [run(100 * version, 20)])
            memory.flip("docs", version)
        for log in reversed(logs):
            other.absorb(told(log), "from another")
        assert drafted(c, run(100, 5), "x") == []
        assert drafted(c, run(200, 5), "x") == [205, 206, 207, 208]

    def test_a_dropped_corpus_is_dropped_at_the_others_and_not_told_to_new_ones(self) -> None:
        a, b, c = new(1), new(2), new(3)
        log, other, late = Exchange(a), Exchange(b), Exchange(c)
        a.add_to_corpus("docs", 1, [run(300, 20)], tenant="x")
        a.flip("docs", 1, tenant="x")
        other.absorb(told(log), "from a")
        a.flip("docs", 2, tenant="x")
        other.absorb(told(log), "from a")
        assert drafted(b, run(300, 5), "x") == []
        log.tell_again()
        assert late.absorb(told(log), "from a") == 1
        assert c.stats()["segments"] == 0

    def test_what_is_for_all_is_refused_where_nothing_may_be(self) -> None:
        a, b = new(1), Memory(Settings(capacity_bytes=4 * MIB, for_all=frozenset()))
        log, other = Exchange(a), Exchange(b)
        a.add_to_corpus("docs", 1, [run(300, 20)])
        a.flip("docs", 1)
        other.absorb(told(log), "from a")
        assert b.stats()["segments"] == 0

    @pytest.mark.parametrize("of", ["model", "tokenizer"])
    def test_what_another_model_or_tokenizer_was_used_for_is_refused_by_name(
        self, of: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        lines: list[str] = []
        monkeypatch.setattr(exchange.logger, "warning", lambda text, *a: lines.append(text % a))
        kind = {"model": b"m", "tokenizer": b"t", of: b"another"}
        a, b = Memory(Settings(capacity_bytes=2 * MIB, replica=1, **kind), lambda: 1000.0), new(2)
        log, other = Exchange(a), Exchange(b)
        answered(a, run(100, 30), "x")
        answered(a, run(200, 30), "x")
        a.add_to_corpus("docs", 1, [run(300, 20)], tenant="x")
        a.flip("docs", 1, tenant="x")
        other.absorb(told(log), "from a")
        assert b.stats()["segments"] == (of == "model"), "a corpus is of no model"
        assert other.of_others == 3 - (of == "model")
        [line] = lines
        assert f"another {of}" in line and b"another".hex() in line

    def test_a_damaged_batch_is_refused_whole_and_named(self) -> None:
        a, b = new(1), new(2)
        log, other = Exchange(a), Exchange(b)
        answered(a, run(100, 30), "x")
        data = told(log)
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
        monkeypatch.setattr(exchange, "MAX_ENTRIES", 4)
        a, b = new(1), new(2)
        log, other = Exchange(a), Exchange(b)
        for n in range(10):
            answered(a, run(100 * n, 30), "x")
        assert other.absorb(told(log), "from a") == 4

    def test_tenants_that_have_something_to_tell_are_bounded(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(exchange, "MAX_ENTRIES", 4)
        a = new(1)
        log = Exchange(a)
        for n in range(10):
            answered(a, run(100 * n, 30), f"tenant {n}")
        assert log.untold == 4

    def test_all_that_a_replica_has_is_told_again_once(self) -> None:
        a, b = new(1), new(2)
        log, other = Exchange(a), Exchange(b)
        answered(a, run(100, 30), "x")
        answered(a, run(200, 30), "y")
        a.add_to_corpus("docs", 1, [run(300, 20)])
        a.flip("docs", 1)
        first = [told(log) for _ in range(3)]
        answered(a, run(400, 30), "x")
        log.tell_again()
        assert log.untold == 5
        assert sum(other.absorb(told(log), "again") for _ in range(3)) == 5
        assert sum(other.absorb(data, "late") for data in first) == 0

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
    def test_what_no_memory_writes_is_not_taken_in(self, wrong: dict[str, Any]) -> None:
        right = {"uid": 5, "created_s": 1.0, "expires_s": 2e9, "version": 0, "source": 2}
        right |= {"corpus": "", "model": b"m", "tokenizer": b"t", "tokens": b"\1\0\0\0" * 2}
        b = new(2)
        for given, kept in ((right | wrong, 0), (right, 1)):
            data = pack(Batch(1, "tenant", "x", [SegmentRecord(**given)]))
            assert Exchange(b).absorb(data, "from a") == kept
        odd = pack(Batch(1, "public", "x", [SegmentRecord(**(right | {"uid": 6}))]))
        assert Exchange(b).absorb(odd, "from a") == 0
