"""What a pull is predicted to cost, and when it is worth it."""

from __future__ import annotations

import pytest

from headrace_kvstore.least_squares import LinearTime
from headrace_kvstore.peers.pull_cost import PeerRun, choose_pull, pull_cost

MIB = 2**20


def line(fixed_s: float, gib_s: float) -> LinearTime:
    return pull_cost(fixed_s or 1e-9, gib_s * 2**30)


def run(peer: str, blocks: int, cost: LinearTime, medium: str = "DRAM") -> PeerRun:
    return PeerRun(peer, ((medium, blocks, cost),))


def test_pulls_of_two_sizes_tell_latency_and_bandwidth() -> None:
    cost = pull_cost()
    for _ in range(60):
        for size in (MIB, 64 * MIB):
            cost.observe(size, 0.004 + size / 2e9)
    assert cost.fixed_s == pytest.approx(0.004, rel=0.02)
    assert 1 / cost.each_s == pytest.approx(2e9, rel=0.02)


def test_a_peer_that_becomes_slow_is_known_as_slow_soon() -> None:
    cost = pull_cost()
    for _ in range(30):
        cost.observe(64 * MIB, 0.03)
    for _ in range(30):
        cost.observe(64 * MIB, 3.0)
    assert cost.seconds(64 * MIB) == pytest.approx(3.0, rel=0.1)


def test_the_pull_that_saves_most_seconds_is_chosen() -> None:
    near, far = line(0.001, 4), line(0.001, 0.1)
    choice = choose_pull([run("far", 10, far), run("near", 8, near)], 8 * MIB, 0.1, 5.0)
    assert choice is not None and (choice.peer, choice.blocks) == ("near", 8)


def test_what_is_computed_as_fast_is_not_pulled() -> None:
    cost = line(0.0, 1)
    pull_s = cost.seconds(MIB)
    assert choose_pull([run("a", 1, cost)], MIB, 0.99 * pull_s, 5.0) is None
    assert choose_pull([run("a", 1, cost)], MIB, 1.01 * pull_s, 5.0) is not None


def test_what_cannot_come_in_time_is_not_pulled() -> None:
    assert choose_pull([run("a", 100, line(0.0, 0.1))], 8 * MIB, 10.0, 5.0) is None


def test_who_has_no_price_pulls_the_longest_run_and_the_cheaper_of_equals() -> None:
    slow, fast = line(0.0, 1), line(0.0, 4)
    choice = choose_pull([run("a", 3, fast), run("b", 4, slow), run("c", 4, fast)], MIB, 0.0, 5.0)
    assert choice is not None and choice.peer == "c"
    assert choose_pull([], MIB, 0.0, 5.0) is None
    assert choose_pull([run("a", 0, fast)], MIB, 0.0, 5.0) is None


def test_each_medium_of_a_run_has_its_price() -> None:
    both = PeerRun("a", (("DRAM", 2, line(0.001, 1)), ("NVME", 1, line(0.02, 1))))
    assert both.blocks == 3
    assert both.pull_s(2**30) == pytest.approx(3.021)
