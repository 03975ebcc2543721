"""The retrieval memory: retrieval, feedback, retention, capacity and isolation."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from benchmarks.draft_memory.one_row import OneRowMemory
from headrace_decode.speculative.draft_batch import DraftSource
from headrace_decode.speculative.retrieval.draft_memory import (
    PUBLIC_KEY,
    MemorySettings,
    tenant_key,
)
from headrace_decode.speculative.retrieval.partition_pool import CapacityError, PartitionPool
from tests.support.clock import Clock

MIB = 1 << 20


@pytest.fixture
def memory(clock: Clock) -> OneRowMemory:
    return OneRowMemory(MemorySettings(capacity_bytes=4 * MIB, replica=1), clock)


def ids(*tokens: int) -> NDArray[np.int32]:
    return np.array(tokens, np.int32)


def run(start: int, count: int) -> NDArray[np.int32]:
    return np.arange(start, start + count, dtype=np.int32)


def answered(
    memory: OneRowMemory,
    tokens: NDArray[np.int32],
    tenant: str = "",
    prompt: tuple[int, ...] = (7,),
) -> None:
    handle = memory.open_request("past", ids(*prompt), tenant)
    memory.extend(handle, tokens)
    memory.close_request(handle)


def drafted(memory: OneRowMemory, *prompt: int, tenant: str = "", most: int = 4) -> list[int]:
    handle = memory.open_request("now", ids(*prompt), tenant)
    tokens = memory.draft(handle, most).tokens.tolist()
    memory.close_request(handle, keep=False)
    return tokens


class TestRetrieval:
    def test_the_continuation_in_the_prompt_is_drafted(self, memory: OneRowMemory) -> None:
        handle = memory.open_request("a", ids(1, 2, 3, 4, 5, 9, 1, 2))
        draft = memory.draft(handle, 3)
        assert draft.tokens.tolist() == [3, 4, 5]
        assert draft.source == DraftSource.PROMPT
        assert draft.match_tokens == 2

    def test_the_requests_own_answer_is_a_source_of_its_own(self, memory: OneRowMemory) -> None:
        handle = memory.open_request("a", ids(50, 51))
        memory.extend(handle, [1, 2, 3, 4, 9, 1, 2])
        draft = memory.draft(handle, 2)
        assert (draft.tokens.tolist(), draft.source) == ([3, 4], DraftSource.OUTPUT)

    def test_a_past_answer_is_found_by_another_request_of_its_tenant(
        self, memory: OneRowMemory
    ) -> None:
        answered(memory, run(100, 20), "a")
        assert drafted(memory, 5, 102, 103, tenant="a") == [104, 105, 106, 107]

    def test_the_beginning_of_an_answer_is_found_after_the_end_of_a_similar_prompt(
        self, memory: OneRowMemory
    ) -> None:
        answered(memory, run(100, 8), prompt=(1, 2, 3))
        assert drafted(memory, 60, 2, 3) == [100, 101, 102, 103]

    def test_the_longer_match_outweighs_the_newer_one(self, memory: OneRowMemory) -> None:
        answered(memory, ids(1, 2, 3, 4, 5, 6, 7, 8, 30, 31))
        answered(memory, ids(99, 8, 40, 41))
        assert drafted(memory, 1, 2, 3, 4, 5, 6, 7, 8)[:1] == [30]

    def test_most_of_equal_matches_decide(self, memory: OneRowMemory) -> None:
        for last in (30, 30, 40):
            answered(memory, ids(1, 2, 3, last, 50 + last))
        assert drafted(memory, 1, 2, 3)[:1] == [30]

    def test_a_match_does_not_reach_across_segments(self, memory: OneRowMemory) -> None:
        memory.add_to_corpus("c", 1, [ids(1, 2, 3), ids(4, 5, 6)])
        memory.activate_corpus("c", 1)
        assert drafted(memory, 9, 2, 3) == []

    def test_nothing_known_drafts_nothing(self, memory: OneRowMemory) -> None:
        assert drafted(memory, 1, 2, 3) == []

    def test_survival_never_rises_along_a_draft(self, memory: OneRowMemory) -> None:
        answered(memory, run(100, 40))
        handle = memory.open_request("a", run(100, 6))
        survival = memory.draft(handle, 16).survival
        assert len(survival) > 3
        assert (np.diff(survival) <= 0).all()
        assert 0 < survival[-1] <= survival[0] <= 1

    def test_a_draft_is_no_longer_than_asked(self, memory: OneRowMemory) -> None:
        answered(memory, run(100, 40))
        assert len(drafted(memory, *range(100, 110), most=2)) == 2
        assert drafted(memory, *range(100, 110), most=0) == []


class TestSteps:
    def test_rows_of_a_step_are_drafted_as_each_would_be_alone(self, memory: OneRowMemory) -> None:
        answered(memory, run(100, 30))
        handles = [memory.open_request(str(n), run(100 + n, 5)) for n in range(6)]
        batch = memory.draft_many(handles, np.array([0, 1, 2, 3, 4, 5], np.int32))
        for row, handle in enumerate(handles):
            alone = memory.draft(handle, row)
            assert batch.lengths[row] == len(alone)
            assert batch.tokens[row, : len(alone)].tolist() == alone.tokens.tolist()
            assert (batch.survival[row, len(alone) :] == 0).all()

    def test_tokens_of_a_step_go_to_their_rows(self, memory: OneRowMemory) -> None:
        handles = [memory.open_request(str(n), ids(n + 1, 50 + n, n + 1)) for n in range(3)]
        memory.extend_many(handles, ids(50, 1, 52, 3), np.array([2, 0, 2]))
        drafts = [memory.draft(handle, 2).tokens.tolist() for handle in handles]
        assert drafts == [[50, 1], [51, 2], [52, 3]]

    def test_a_closed_or_unknown_handle_drafts_nothing_and_does_no_harm(
        self, memory: OneRowMemory
    ) -> None:
        handle = memory.open_request("a", ids(1, 2, 1))
        memory.close_request(handle)
        again = memory.open_request("b", ids(1, 2, 1))
        for bad in (handle, 0, -5, 1 << 40):
            memory.extend(bad, [9, 9])
            memory.close_request(bad)
            assert len(memory.draft(bad, 4)) == 0
        assert memory.draft(again, 1).tokens.tolist() == [2]

    def test_more_requests_than_there_were_rows_for(self, memory: OneRowMemory) -> None:
        handles = [memory.open_request(str(n), ids(n, 500, n)) for n in range(70)]
        batch = memory.draft_many(handles, 1)
        assert batch.tokens[:, 0].tolist() == [500] * 70

    def test_a_long_request_forgets_its_oldest_tokens_only(self) -> None:
        memory = OneRowMemory(MemorySettings(capacity_bytes=4 * MIB, run_tokens=1024))
        handle = memory.open_request("a", run(0, 600))
        for start in range(600, 3000, 300):
            memory.extend(handle, run(start, 300))
        memory.extend(handle, ids(2500))
        assert memory.draft(handle, 2).tokens.tolist() == [2501, 2502]
        memory.extend(handle, ids(100))
        assert len(memory.draft(handle, 2)) == 0


class TestFeedback:
    def test_accepted_drafts_raise_survival_and_refused_ones_lower_it(
        self, memory: OneRowMemory
    ) -> None:
        answered(memory, run(100, 40))

        def after(accepted: int) -> float:
            handle = memory.open_request("a", run(100, 4))
            for _ in range(600):
                draft = memory.draft(handle, 1)
                memory.feedback(draft, len(draft), accepted)
            return float(memory.draft(handle, 1).survival.sum())

        before = after(1)
        assert before > 0.9
        assert after(0) < before

    def test_a_token_refused_here_gives_way_to_the_other_candidate(
        self, memory: OneRowMemory
    ) -> None:
        for last in (30, 30, 40):
            answered(memory, ids(1, 2, 3, last, 50))
        handle = memory.open_request("a", ids(1, 2, 3))
        for _ in range(3):
            draft = memory.draft(handle, 1)
            memory.feedback(draft, 1, int(draft.tokens[0] == 40))
        assert memory.draft(handle, 1).tokens.tolist() == [40]

    def test_refusals_are_forgotten_with_time(self, memory: OneRowMemory, clock: Clock) -> None:
        for last in (30, 30, 40):
            answered(memory, ids(1, 2, 3, last, 50))
        handle = memory.open_request("a", ids(1, 2, 3))
        for _ in range(2):
            memory.feedback(memory.draft(handle, 1), 1, 0)
        clock.now_s += 3600
        assert memory.draft(handle, 1).tokens.tolist() == [30]

    def test_a_draft_that_the_engine_cut_short_is_no_failure(self, memory: OneRowMemory) -> None:
        answered(memory, run(100, 20))
        handle = memory.open_request("a", run(100, 4))
        before = memory.draft(handle, 3).survival
        memory.feedback(memory.draft(handle, 3), 0, 0)
        assert (memory.draft(handle, 3).survival == before).all()
        memory.feedback(memory.draft(handle, 3), 2, 2)
        assert (memory.draft(handle, 3).survival > before).all()
        assert memory.pool.headers["refused"].sum() == 0

    def test_feedback_for_an_evicted_segment_touches_no_other(self, memory: OneRowMemory) -> None:
        answered(memory, run(100, 20), "a")
        handle = memory.open_request("a", run(100, 4), "a")
        draft = memory.draft(handle, 4)
        memory.pool.drop(tenant_key("a"))
        answered(memory, run(200, 20), "b")
        memory.feedback(draft, 4, 4)
        assert memory.pool.headers["accepted"].sum() == 0

    @pytest.mark.parametrize("k", [(9, 9), (-1, -1), (4, 9)])
    def test_impossible_feedback_is_clamped(self, memory: OneRowMemory, k: tuple[int, int]) -> None:
        handle = memory.open_request("a", ids(1, 2, 1))
        draft = memory.draft(handle, 4)
        memory.feedback(draft, *k)
        assert len(memory.draft(handle, 4).tokens) == len(draft.tokens), "it drafts on"


class TestRetention:
    def test_an_answer_that_is_not_to_be_kept_is_not(self, memory: OneRowMemory) -> None:
        handle = memory.open_request("a", ids(1))
        memory.extend(handle, run(100, 10))
        memory.close_request(handle, keep=False)
        assert memory.stats()["kept_tokens"] == 0

    def test_an_answer_expires(self, clock: Clock) -> None:
        memory = OneRowMemory(MemorySettings(capacity_bytes=4 * MIB, response_ttl_s=60), clock)
        answered(memory, run(100, 10))
        clock.now_s += 59
        assert drafted(memory, 100, 101) != []
        clock.now_s += 1
        assert drafted(memory, 100, 101) == []

    def test_a_corpus_is_drafted_from_once_its_version_is_active(
        self, memory: OneRowMemory
    ) -> None:
        memory.add_to_corpus("c", 1, [ids(1, 2, 10)])
        assert drafted(memory, 1, 2) == []
        memory.activate_corpus("c", 1)
        memory.add_to_corpus("c", 2, [ids(1, 2, 20)])
        assert drafted(memory, 1, 2) == [10]
        memory.activate_corpus("c", 2)
        assert drafted(memory, 1, 2) == [20]
        memory.activate_corpus("c", 0)
        assert drafted(memory, 1, 2) == []

    def test_versions_count_from_one(self, memory: OneRowMemory) -> None:
        with pytest.raises(ValueError, match="'c' has version 0"):
            memory.add_to_corpus("c", 0, [ids(1, 2)])


class TestCapacity:
    def test_too_small_a_capacity_is_refused_with_the_minimum(self) -> None:
        with pytest.raises(CapacityError, match="1000 bytes is too small"):
            PartitionPool(1000)

    def test_the_oldest_go_first_and_the_capacity_holds(self) -> None:
        memory = OneRowMemory(MemorySettings(capacity_bytes=MIB))
        for n in range(600):
            answered(memory, run(1000 * n, 100))
            assert memory.stats()["used_bytes"] <= MIB
        assert memory.stats()["evicted_segments"] > 0
        assert drafted(memory, 1, 2) == []
        assert drafted(memory, 599_001, 599_002) != []

    def test_a_small_tenant_is_not_displaced_by_a_large_one(self) -> None:
        memory = OneRowMemory(MemorySettings(capacity_bytes=MIB))
        answered(memory, run(500_000, 50), "small")
        for n in range(600):
            answered(memory, run(1000 * n, 100), "large")
        assert drafted(memory, 500_001, 500_002, tenant="small") != []

    def test_a_large_tenant_makes_room_for_new_ones(self) -> None:
        memory = OneRowMemory(MemorySettings(capacity_bytes=MIB))
        for n in range(600):
            answered(memory, run(1000 * n, 100), "large")
        answered(memory, run(900_000, 50), "new")
        assert drafted(memory, 900_001, 900_002, tenant="new") != []
        assert drafted(memory, 599_001, 599_002, tenant="large") != []

    def test_20_000_salts_then_a_request_drafts_from_its_own_prompt(self) -> None:
        memory = OneRowMemory(MemorySettings())
        for n in range(20_000):
            memory.close_request(memory.open_request("", ids(1, 2, 3), f"salt {n}"), keep=False)
        assert drafted(memory, 1, 2, 3, 1, 2, tenant="new") == [3, 1, 2]
        assert memory.stats()["partitions"] < 16_000
        answered(memory, run(500_000, 50), "new")
        assert drafted(memory, 500_001, 500_002, tenant="new") != []

    def test_tenants_with_one_request_displace_only_each_other(self) -> None:
        memory = OneRowMemory(MemorySettings(capacity_bytes=4 * MIB))
        memory.add_to_corpus("c", 1, [run(0, 30_000)])
        memory.activate_corpus("c", 1)
        for n in range(1000):
            answered(memory, run(100_000 + 100 * n, 50), f"salt {n}")
            answered(memory, run(900_000, 50), "regular")
        assert memory.stats()["evicted_segments"] > 500
        assert drafted(memory, 900_001, 900_002, tenant="regular") != []
        assert drafted(memory, 199_901, 199_902, tenant="salt 999") != []
        assert drafted(memory, 100_001, 100_002, tenant="salt 0") == []
        assert memory.stats()["kept_tokens"] > 30_000, "the corpus is there, too"

    def test_a_request_whose_tenant_was_displaced_reads_no_other_partition(self) -> None:
        memory = OneRowMemory(MemorySettings(capacity_bytes=MIB))
        answered(memory, run(500_000, 50), "idle")
        handle = memory.open_request("open", run(0, 12), "idle")
        for n in range(200):
            answered(memory, run(0, 40), f"salt {n}")
        assert memory.pool.find(tenant_key("idle")) is None
        assert len(memory.draft(handle, 4)) == 0
        memory.close_request(handle)
        assert not memory.pool.drop(tenant_key("salt 0")), "it had gone before"
        assert memory.pool.drop(tenant_key("salt 199"))
        assert drafted(memory, *range(12), tenant="salt 199") == []

    def test_many_short_answers_of_one_tenant_leave_headers_for_others(self) -> None:
        memory = OneRowMemory(MemorySettings(capacity_bytes=MIB))
        for n in range(2000):
            answered(memory, ids(3 * n, 3 * n + 1, 3 * n + 2), "large", prompt=())
        answered(memory, run(500_000, 50), "small")
        assert drafted(memory, 500_001, 500_002, tenant="small") != []

    def test_a_long_document_becomes_several_segments(self, memory: OneRowMemory) -> None:
        assert memory.add_to_corpus("c", 1, [run(0, 20_000)]) == 20_000
        memory.activate_corpus("c", 1)
        assert drafted(memory, 19_000, 19_001) == [19_002, 19_003, 19_004, 19_005]
        row = memory.pool.find(PUBLIC_KEY)
        assert row is not None and len(memory.pool.segments(row)) == 3


class TestIsolation:
    SECRET = run(777_000, 24)

    def test_a_secret_is_drafted_for_its_tenant_and_no_other(self, memory: OneRowMemory) -> None:
        answered(memory, self.SECRET, "a")
        prefix = self.SECRET[:12].tolist()
        assert drafted(memory, *prefix, tenant="a") == self.SECRET[12:16].tolist()
        for other in ("b", "", "public", "A", "a "):
            assert drafted(memory, *prefix, tenant=other) == []

    def test_an_open_request_is_never_read_for_another_even_of_its_tenant(
        self, memory: OneRowMemory
    ) -> None:
        memory.open_request("open", self.SECRET, "a")
        assert drafted(memory, *self.SECRET[:12].tolist(), tenant="a") == []

    def test_a_request_does_not_read_the_next_partition_in_the_row_of_a_dropped_one(
        self, memory: OneRowMemory
    ) -> None:
        handle = memory.open_request("mine", self.SECRET[:12], "a")
        answered(memory, run(5, 5), "a")
        memory.pool.drop(tenant_key("a"))
        answered(memory, self.SECRET, "b")
        assert len(memory.draft(handle, 4)) == 0

    def test_a_tenants_corpus_is_no_others(self, memory: OneRowMemory) -> None:
        memory.add_to_corpus("c", 1, [self.SECRET], tenant="a")
        memory.activate_corpus("c", 1, tenant="a")
        memory.activate_corpus("c", 1)
        assert drafted(memory, *self.SECRET[:4].tolist(), tenant="b") == []
        assert drafted(memory, *self.SECRET[:4].tolist(), tenant="a") != []

    def test_one_tenants_refusals_do_not_change_anothers_drafts(self, clock: Clock) -> None:
        def drafts_of_b(refused_for_a: int) -> list[int]:
            memory = OneRowMemory(MemorySettings(capacity_bytes=4 * MIB), clock, learns=False)
            for tenant in "ab":
                for last in (30, 30, 40):
                    answered(memory, ids(1, 2, 3, last, 50), tenant)
            handle = memory.open_request("x", ids(1, 2, 3), "a")
            for _ in range(refused_for_a):
                memory.feedback(memory.draft(handle, 1), 1, 0)
            return drafted(memory, 1, 2, 3, tenant="b")

        assert drafts_of_b(20) == drafts_of_b(0)
