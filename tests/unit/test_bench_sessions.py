"""The benchmark of agents' sessions: its traces, the policies to compare with, and its clock."""

from __future__ import annotations

import numpy as np

from benchmarks.kvpolicy.replay import Replay
from benchmarks.kvpolicy.workload import Costs, from_chains
from benchmarks.sessions.__main__ import recomputed, working_set
from benchmarks.sessions.agents import CONTEXT_TOKENS, as_workload, sessions
from benchmarks.sessions.baselines import Belady, FixedTtl
from benchmarks.sessions.serving import prefill_s, speed_of, ttfts_s
from headrace_kvstore.policy.recency import LRU

BLOCK_TOKENS = 256
COSTS = Costs(block_tokens=BLOCK_TOKENS)


def test_sessions_grow_and_return_within_ten_seconds_19_times_of_20() -> None:
    found = sessions(1, 120.0, BLOCK_TOKENS)
    gaps_s = np.concatenate([s.gaps_s for s in found])
    assert 0.93 < (gaps_s < 10.0).mean() < 0.97
    assert all((np.diff(s.tokens) >= 200).all() for s in found)
    assert max(s.tokens[-1] for s in found) <= CONTEXT_TOKENS
    assert all(len(s.blocks) == s.tokens[-1] // BLOCK_TOKENS for s in found)


def test_sessions_share_their_system_prompt_and_nothing_else() -> None:
    found = sessions(2, 60.0, BLOCK_TOKENS)
    work = as_workload(found, 60.0, BLOCK_TOKENS)
    first: dict[int, tuple[int, int]] = {}
    for i, session in enumerate(found):
        for depth, block in enumerate(session.blocks.tolist()):
            other, at = first.setdefault(block, (i, depth))
            assert at == depth
            assert other == i or depth < 8_192 // BLOCK_TOKENS
    assert (np.diff(work.arrival_s) >= 0).all()


def test_the_working_set_is_what_was_used_and_will_be() -> None:
    work = from_chains("w", [[1, 2], [3], [4], [1, 2], [3]], [0.0, 1.0, 2.0, 3.0, 4.0])
    assert working_set(work) == 3
    assert working_set(from_chains("w", [[1, 2], [1, 3]], [0.0, 1.0])) == 1


def test_a_clairvoyant_recomputes_least() -> None:
    work = as_workload(sessions(3, 40.0, BLOCK_TOKENS), 40.0, BLOCK_TOKENS)
    found = recomputed(work, COSTS, working_set(work) // 2)
    assert found["belady"] == min(found.values())
    assert all(tokens > 0 for tokens in found.values())


def test_a_clairvoyant_keeps_the_prompt_that_returns_first() -> None:
    work = from_chains("w", [[1], [2], [3], [2], [1]], [0.0, 1.0, 2.0, 3.0, 4.0])
    assert Replay(work, COSTS, 2, Belady(work, 2)).run().hits.tolist() == [0, 0, 0, 1, 0]


def test_a_block_younger_than_its_time_to_live_stays() -> None:
    work = from_chains("w", [[1], [2], [3], [1], [3]], [0.0, 1.0, 2.0, 3.0, 30.0])
    assert Replay(work, COSTS, 2, FixedTtl(10.0)).run().hits.tolist() == [0, 0, 0, 1, 0]
    assert Replay(work, COSTS, 2, LRU()).run().hits.tolist() == [0, 0, 0, 0, 1]


def test_a_slow_answer_delays_the_turns_after_it() -> None:
    found = sessions(4, 60.0, BLOCK_TOKENS)
    work = as_workload(found, 60.0, BLOCK_TOKENS)
    fast = speed_of(work, COSTS, 0.5)
    ttft_s = [
        ttfts_s(found, COSTS, Replay(work, COSTS, work.distinct, LRU()), speed, 60.0, 0.0)
        for speed in (1e12, fast, fast / 10)
    ]
    begun = [np.isfinite(each).sum() for each in ttft_s]
    assert begun[0] >= begun[1] > begun[2]
    assert max(ttft_s[0]) <= CONTEXT_TOKENS / BLOCK_TOKENS * COSTS.load_s
    assert np.median(ttft_s[1]) < np.median(ttft_s[2])


def test_a_node_that_is_behind_answers_more_turns_in_time_if_short_ones_pass_long_ones() -> None:
    found = sessions(4, 60.0, BLOCK_TOKENS)
    work = as_workload(found, 60.0, BLOCK_TOKENS)
    speed = speed_of(work, COSTS, 0.5) / 10
    in_time = []
    for stretch in (0.0, 1.0, 100.0):
        cache = Replay(work, COSTS, work.distinct, LRU())
        ttft_s = np.array(ttfts_s(found, COSTS, cache, speed, 60.0, stretch))
        in_time.append(int((ttft_s <= 2.0).sum()))
    assert in_time[0] <= in_time[1] < in_time[2]


def test_prefill_in_two_parts_takes_as_long_as_in_one() -> None:
    whole = prefill_s(COSTS, 0, 3_000)
    assert np.isclose(prefill_s(COSTS, 0, 1_000) + prefill_s(COSTS, 1_000, 3_000), whole)
