"""What the plans benchmark measures is a real plan, from a real index."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("headrace.router.blocks.block_index")

from benchmarks.routing.plans import BLOCKS, SHARED_BLOCKS, TOKENS, Cluster, prompts, seconds


def test_prompts_begin_alike_and_end_apart() -> None:
    first, second = prompts(2)
    assert len(first) == BLOCKS
    assert (first[:SHARED_BLOCKS] == second[:SHARED_BLOCKS]).all()
    assert not np.isin(first[SHARED_BLOCKS:], second).any()


def test_a_plan_reads_what_the_index_knows() -> None:
    cluster, asked = Cluster(12, 12, 3), prompts(4)
    cluster.fill(asked)
    plans = [cluster.plan(keys) for keys in asked]
    assert all(sum(run.tokens for run in plan.runs) == TOKENS for plan in plans)
    assert any(run.source != "compute" for plan in plans for run in plan.runs)


def test_calls_are_timed_in_turn_and_the_first_two_rounds_do_not_count() -> None:
    called: list[int] = []
    took = seconds([lambda: called.append(0), lambda: called.append(1)], 3)
    assert called == [0, 1] * 5 and len(took) == 6
