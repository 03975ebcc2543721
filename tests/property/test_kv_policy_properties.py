"""Whatever the table holds, a policy's choice keeps prefixes whole; the optimum's bounds hold."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.kvpolicy.lfu import LFU
from benchmarks.kvpolicy.optimum import Clairvoyant
from benchmarks.kvpolicy.priority import Priority
from benchmarks.kvpolicy.replay import Replay
from benchmarks.kvpolicy.s3fifo import S3FIFO
from benchmarks.kvpolicy.workload import Costs, Workload, from_chains
from headrace_kvstore.blocks.slot_record import FREE, PINNED, READY, SLOT, WRITING
from headrace_kvstore.policy.base import Policy
from headrace_kvstore.policy.cost_aware import CostAware, state_dtype
from headrace_kvstore.policy.hazard import AGES, CELLS, best_rate, fit
from headrace_kvstore.policy.history import PACE_TURNS, usual_gap_s
from headrace_kvstore.policy.recency import LRU

MAKERS = {
    "lru": lambda n: LRU(),
    "lfu": lambda n: LFU(np.zeros(n)),
    "priority": lambda n: Priority(),
    "s3-fifo": S3FIFO.create,
    "cost-aware": lambda n: CostAware(np.zeros(1, state_dtype(8, 64))),
}

seconds = st.sampled_from([0.0, 1.0, 50.0, 99.0, 100.0, 101.0, 5000.0])


@st.composite
def tables(draw: st.DrawFn) -> np.ndarray:
    """Forests with gaps: some parents are missing, slots are shuffled, a few are held."""
    n = draw(st.integers(1, 24))
    parents = [draw(st.integers(-1, i - 1)) for i in range(n)]
    places = draw(st.permutations(range(n)))
    table = np.zeros(n, SLOT)
    depth: list[int] = []
    for i, parent in enumerate(parents):
        depth.append(0 if parent < 0 else depth[parent] + 1)
        row = table[places[i]]
        row["state"] = draw(st.sampled_from([READY, READY, READY, WRITING, FREE]))
        row["hash"] = (i + 1).to_bytes(8, "little")
        row["parent"] = parent + 1
        row["depth"] = depth[i]
        row["kept_until_s"] = draw(st.sampled_from([0.0] * 8 + [100.0, 101.0, PINNED]))
        row["tenant"] = draw(st.integers(0, 4))
        row["used_s"] = draw(seconds)
        row["lease_until_s"] = draw(seconds)
        row["bytes"], row["compute_s"] = 1e6, draw(st.floats(0, 1))
    return table


def parent_slot(table: np.ndarray, slot: int) -> int | None:
    """By definition: the slot in use whose hash is this one's parent."""
    for other in np.flatnonzero(table["state"] != FREE).tolist():
        head = int.from_bytes(bytes(table["hash"][other])[:8], "little")
        if table["depth"][slot] > 0 and head == table["parent"][slot]:
            return other
    return None


def is_orphan(table: np.ndarray, slot: int) -> bool:
    while table["depth"][slot] > 0:
        above = parent_slot(table, slot)
        if above is None:
            return True
        slot = above
    return False


@pytest.mark.parametrize("name", MAKERS)
@given(table=tables(), need=st.integers(0, 30))
@settings(max_examples=40)
def test_a_choice_is_held_by_nobody_and_breaks_no_prefix(
    name: str, table: np.ndarray, need: int
) -> None:
    policy: Policy = MAKERS[name](len(table))
    chosen = policy.choose(table, 100.0, need).tolist()
    assert len(chosen) == len(set(chosen)) <= need
    gone: set[int] = set()
    for slot in chosen:
        row = table[slot]
        assert row["state"] == READY
        assert row["kept_until_s"] <= 100.0 and row["lease_until_s"] <= 100.0
        if not is_orphan(table, slot):
            children = {
                c
                for c in np.flatnonzero(table["state"] != FREE).tolist()
                if parent_slot(table, c) == slot
            }
            assert children <= gone
        gone.add(slot)


@pytest.mark.parametrize("name", MAKERS)
@given(table=tables())
@settings(max_examples=20)
def test_all_that_can_go_goes(name: str, table: np.ndarray) -> None:
    held = {
        s
        for s in range(len(table))
        if table["state"][s] == WRITING
        or (
            table["state"][s] == READY
            and (table["kept_until_s"][s] > 100.0 or table["lease_until_s"][s] > 100.0)
        )
    }
    for slot in list(held):
        while not is_orphan(table, slot) and (above := parent_slot(table, slot)) is not None:
            held.add(above)
            slot = above
    chosen = MAKERS[name](len(table)).choose(table, 100.0, len(table)).tolist()
    expected = set(np.flatnonzero(table["state"] == READY).tolist()) - held
    assert set(chosen) == expected


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    """Prompts that extend or branch off earlier ones, or are new."""
    chains: list[list[int]] = []
    fresh = iter(range(1000))
    for _ in range(draw(st.integers(2, 7))):
        base = draw(st.sampled_from([[], *chains]))
        kept = base[: draw(st.integers(0, len(base)))]
        chains.append(kept + [next(fresh) for _ in range(draw(st.integers(0, 2)))] or [next(fresh)])
    return from_chains("made up", chains, [10.0 * i for i in range(len(chains))])


@given(work=workloads(), slots=st.integers(1, 5))
@settings(max_examples=40)
def test_the_optimum_lies_between_schedule_and_bound(work: Workload, slots: int) -> None:
    saving_s = np.arange(30) ** 1.2
    clairvoyant = Clairvoyant(work, saving_s)
    found = clairvoyant.solve(slots, steps=200)
    exact = exhaustive(work, clairvoyant.known, saving_s, slots)
    assert found.saved_s.sum() <= exact + 1e-9 <= found.bound_s + 1e-6


def exhaustive(work: Workload, known: np.ndarray, saving_s: np.ndarray, slots: int) -> float:
    chains = [work.blocks[a:b].tolist() for a, b in zip(work.starts, work.starts[1:], strict=False)]
    best = 0.0
    for hits in product(*(range(min(int(k), slots) + 1) for k in known)):
        room = [slots] * len(chains)
        for j, m in enumerate(hits):
            for block in chains[j][:m]:
                since = max(i for i in range(j) if block in chains[i])
                for span in range(since, j):
                    room[span] -= 1
        if min(room) >= 0:
            best = max(best, sum(float(saving_s[m]) for m in hits))
    return best


@pytest.mark.parametrize("name", MAKERS)
@given(work=workloads(), slots=st.integers(1, 30))
@settings(max_examples=15)
def test_a_replay_keeps_its_books(name: str, work: Workload, slots: int) -> None:
    replay = Replay(work, Costs(), slots, MAKERS[name](slots))
    outcome = replay.run()
    used = np.flatnonzero(replay.table["state"] == READY)
    assert len(used) + len(replay.free) == slots
    assert (replay.slot_of[replay.block_in[used]] == used).all()
    known = work.endless_hits()
    assert (outcome.hits <= known).all()
    if slots >= work.distinct:
        assert outcome.hits.tolist() == known.tolist()


@given(
    cells=st.lists(
        st.tuples(st.integers(0, 2000), st.integers(0, AGES - 1), st.floats(0, 1e4)), max_size=8
    )
)
@settings(max_examples=15)
def test_hazards_and_best_rates_are_positive_and_finite(
    cells: list[tuple[int, int, float]],
) -> None:
    events, exposure_s = np.zeros((CELLS, AGES)), np.zeros((CELLS, AGES))
    for cell, age, amount in cells:
        events[cell, age] += amount
        exposure_s[cell, age] += amount * 100
    hazard = fit(events, exposure_s)
    rate = best_rate(hazard)
    assert np.isfinite(rate).all() and (hazard > 0).all()
    assert (rate <= hazard.max(axis=1, keepdims=True) * (1 + 1e-9)).all()


@given(gaps_s=st.lists(st.floats(1e-3, 1e5), min_size=1, max_size=40))
def test_the_usual_gap_is_the_geometric_mean_until_older_gaps_fade(gaps_s: list[float]) -> None:
    usual_s = -1.0
    for turn, gap_s in enumerate(gaps_s, 1):
        usual_s = usual_gap_s(usual_s, gap_s, turn)
        assert min(gaps_s[:turn]) * 0.999 <= usual_s <= max(gaps_s[:turn]) * 1.001
        if turn <= PACE_TURNS:
            assert np.isclose(np.log(usual_s), np.mean(np.log(gaps_s[:turn])), atol=1e-6)
