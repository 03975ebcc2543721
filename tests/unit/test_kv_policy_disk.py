"""What is kept on disk, and what is written there: by seconds saved, not by age."""

from __future__ import annotations

import numpy as np
import pytest

from headrace_kvstore.blocks.slot_record import SLOT
from headrace_kvstore.policy.base import block_keys, saved_s
from headrace_kvstore.policy.cost_aware import CostAware, state_dtype
from headrace_kvstore.policy.recency import LRU

MB, BYTE_S = 1.5e6, 1e-3 / 1.5e6  # loads in a millisecond


def rows(**columns: list[float]) -> np.ndarray:
    made = np.zeros(len(next(iter(columns.values()))), SLOT)
    made["bytes"] = MB
    for name, values in columns.items():
        made[name] = values
    return made


def test_what_a_block_saves_is_computing_less_loading() -> None:
    given = rows(compute_s=[0.1, 0.0005])
    assert saved_s(given, BYTE_S).tolist() == pytest.approx([0.099, 0.0])
    given["bytes"] *= 1000.0
    assert saved_s(given, BYTE_S)[0] == 0.0  # loading so much is slower than computing it


def test_a_load_that_nobody_measured_counts_as_free() -> None:
    assert saved_s(rows(compute_s=[0.1, 0.0005]), 0.0).tolist() == pytest.approx([0.1, 0.0005])


def test_a_block_of_which_nobody_told_costs_what_the_others_cost_a_byte() -> None:
    given = rows(compute_s=[0.1, 0.0, 0.3], bytes=[MB, 3 * MB, MB])
    assert saved_s(given, 0.0).tolist() == pytest.approx([0.1, 0.6, 0.3])
    none_told = saved_s(rows(compute_s=[0.0, 0.0], bytes=[MB, 2 * MB]), BYTE_S)
    assert none_told[1] == pytest.approx(2 * none_told[0]) and none_told[0] > 0.0


def test_worth_counts_seconds_before_age() -> None:
    given = rows(compute_s=[0.2, 0.02], used_s=[100.0, 900.0])
    rate = LRU().rates(np.zeros(2, np.uint64), given, 1000.0)
    assert rate[0] < rate[1]
    worth = rate * saved_s(given, BYTE_S)
    assert worth[0] > worth[1]


def test_without_a_history_used_often_and_lately_is_likely() -> None:
    given = rows(hits=[0, 5, 0], used_s=[10.0, 10.0, 900.0])
    rate = LRU().rates(np.zeros(3, np.uint64), given, 1000.0)
    assert rate[0] < rate[2] < rate[1]


def test_cost_aware_expects_a_conversation_that_waits() -> None:
    policy = CostAware(np.zeros(1, state_dtype(64, 512)))
    keys = block_keys(0, np.array([1, 2, 3, 4, 9], np.uint64))
    policy.prompt(keys[[0, 1]], 0.0)
    policy.prompt(keys[[0, 1, 3]], 10.0)
    rate = policy.rates(keys, rows(used_s=[10.0] * 5), 20.0)
    assert rate[0] == rate[1] == rate[3] > 0.0
    assert rate[4] > 0.0  # never seen: as a first turn
    assert (policy.rates(keys, rows(used_s=[10.0] * 5), 9000.0)[[0, 3]] < rate[[0, 3]]).all()
