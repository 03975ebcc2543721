"""Which slots the store's policies give up."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.kvpolicy.lfu import LFU
from benchmarks.kvpolicy.priority import Priority
from benchmarks.kvpolicy.s3fifo import S3FIFO
from headrace_kvstore.blocks.slot_record import FREE, PINNED, READY, SLOT, WRITING
from headrace_kvstore.policy.base import Policy, block_keys, evictable, slot_keys
from headrace_kvstore.policy.cost_aware import CostAware, state_dtype
from headrace_kvstore.policy.recency import LRU
from headrace_kvstore.policy.tree import ORPHAN, ROOT, Forest

NOW_S = 1000.0
LONG_S = 1e6


class Store:
    """A table filled by hand: chains of block numbers, one slot a block."""

    def __init__(self, policy_of, slots: int = 16) -> None:
        self.table = np.zeros(slots, SLOT)
        self.policy: Policy = policy_of(slots)
        self.slot: dict[int, int] = {}

    def prompt(self, chain: list[int], now_s: float, priority: int = 0) -> None:
        """Ask for `chain`: lease what is there, write the rest."""
        self.policy.prompt(keys(chain), now_s)
        touched = getattr(self.policy, "touched", lambda *_: None)
        held = [self.slot[b] for b in chain if b in self.slot]
        self.table["used_s"][held] = now_s
        touched(self.table, np.array(held, np.int64), now_s, True)
        fresh = []
        for depth, block in enumerate(chain):
            if block in self.slot:
                continue
            at = int(np.flatnonzero(self.table["state"] == FREE)[0])
            row = self.table[at]
            row["state"], row["depth"], row["tenant"] = READY, depth, priority
            row["hash"] = block.to_bytes(8, "little") + bytes(24)
            row["parent"] = chain[depth - 1] if depth else 0
            row["used_s"] = row["stored_s"] = now_s
            row["bytes"], row["compute_s"] = 1e6, 0.05
            self.slot[block] = at
            fresh.append(at)
        touched(self.table, np.array(fresh, np.int64), now_s, False)

    def choose(self, need: int, now_s: float = NOW_S) -> list[int]:
        block_of = {s: b for b, s in self.slot.items()}
        return [block_of[s] for s in self.policy.choose(self.table, now_s, need).tolist()]

    def give_up(self, need: int, now_s: float = NOW_S) -> list[int]:
        """As `choose`, and the policy hears that they go."""
        chosen = self.choose(need, now_s)
        assert isinstance(self.policy, S3FIFO)
        self.policy.given_up(self.table, np.array([self.slot[b] for b in chosen], np.int64))
        return chosen

    def drop(self, block: int) -> None:
        self.table[self.slot.pop(block)] = np.zeros((), SLOT)


def keys(chain: list[int]) -> np.ndarray:
    return block_keys(0, np.array(chain, np.uint64))


MAKERS = {
    "lru": lambda n: LRU(),
    "lfu": lambda n: LFU(np.zeros(n)),
    "priority": lambda n: Priority(),
    "s3-fifo": S3FIFO.create,
    "cost-aware": lambda n: CostAware(np.zeros(1, state_dtype(64, 512))),
}


@pytest.fixture(params=MAKERS)
def store(request: pytest.FixtureRequest) -> Store:
    return Store(MAKERS[request.param])


def test_the_deepest_block_of_a_chain_goes_first(store: Store) -> None:
    store.prompt([1, 2, 3, 4], 0.0)
    assert store.choose(3) == [4, 3, 2]


def test_a_block_whose_ancestor_is_gone_goes_before_everything(store: Store) -> None:
    store.prompt([1, 2, 3], 900.0)
    store.prompt([7, 8], 0.0)
    store.drop(2)
    assert store.choose(1) == [3]


@pytest.mark.parametrize(
    "field, value",
    [("kept_until_s", NOW_S + 1), ("kept_until_s", PINNED), ("lease_until_s", NOW_S + 1)],
)
def test_a_held_block_keeps_its_ancestors(store: Store, field: str, value: float) -> None:
    store.prompt([1, 2, 3], 0.0)
    store.table[field][store.slot[2]] = value
    assert store.choose(3) == [3]


def test_a_block_being_written_stays_and_an_empty_table_gives_nothing(store: Store) -> None:
    assert store.choose(4) == []
    store.prompt([1], 0.0)
    store.table["state"][store.slot[1]] = WRITING
    assert store.choose(4) == []


def test_a_choice_is_among_those_given(store: Store) -> None:
    store.prompt([1, 2], 0.0)
    store.prompt([5, 6], 1.0)
    mine = np.zeros(16, np.bool_)
    mine[[store.slot[5], store.slot[6]]] = True
    chosen = store.policy.choose(store.table, NOW_S, 4, mine).tolist()
    assert chosen == [store.slot[6], store.slot[5]]


def test_no_more_than_asked_for(store: Store) -> None:
    store.prompt([1, 2, 3], 0.0)
    assert store.choose(0) == []
    assert sorted(store.choose(99)) == [1, 2, 3]


def test_a_lease_ends_at_its_last_second() -> None:
    table = np.zeros(2, SLOT)
    table["state"] = READY
    table["lease_until_s"] = [NOW_S, NOW_S + 1e-3]
    assert evictable(table, NOW_S).tolist() == [True, False]


def test_namespaces_do_not_share_keys_or_parents() -> None:
    table = np.zeros(2, SLOT)
    table["state"] = READY
    table["depth"] = [0, 1]
    table["hash"] = [(5).to_bytes(8, "little"), (6).to_bytes(8, "little")]
    table["parent"] = [0, 5]
    assert Forest(table).parents.tolist() == [ROOT, 0]
    table["namespace"] = [0, 1]
    assert Forest(table).parents.tolist() == [ROOT, ORPHAN]
    table["hash"] = table["hash"][0]
    assert len(set(slot_keys(table).tolist())) == 2


def test_lru_gives_up_the_least_recently_used() -> None:
    store = Store(MAKERS["lru"])
    store.prompt([1, 2], 1.0)
    store.prompt([5, 6], 2.0)
    store.prompt([1, 2], 3.0)
    assert store.choose(2) == [6, 5]


def test_lfu_keeps_the_often_used_until_the_count_fades() -> None:
    store = Store(MAKERS["lfu"])
    for t in range(4):
        store.prompt([1], float(t))
    store.prompt([2], 500.0)
    assert store.choose(1, 600.0) == [2]
    store.prompt([2], 3000.0)
    assert store.choose(1, 3000.0) == [1]


def test_lfu_wants_a_half_life() -> None:
    with pytest.raises(ValueError, match="half_life_s"):
        LFU(np.zeros(1), 0.0)


def test_priority_comes_before_recency() -> None:
    store = Store(MAKERS["priority"])
    store.prompt([1], 1.0, priority=5)
    store.prompt([2], 3.0, priority=1)
    store.prompt([3], 2.0, priority=1)
    store.prompt([4], 4.0)
    assert store.choose(4) == [4, 3, 2, 1]


def test_s3fifo_passes_over_what_was_used_and_lets_a_scan_go() -> None:
    store = Store(MAKERS["s3-fifo"], slots=8)  # a tenth is none: the small queue gives first
    store.prompt([1], 0.0)
    store.prompt([1], 1.0)
    for scan in (2, 3, 4):
        store.prompt([scan], 2.0)
    assert store.choose(3) == [2, 3, 4]


def test_s3fifo_remembers_what_left_the_small_queue() -> None:
    store = Store(MAKERS["s3-fifo"], slots=8)  # a tenth is none: the small queue gives first
    store.prompt([1], 0.0)
    assert store.give_up(1) == [1]
    store.drop(1)
    store.prompt([1], 1.0)
    for later in (2, 3):
        store.prompt([later], 2.0)
    assert store.choose(2) == [2, 3]


def taught(slots: int = 32) -> Store:
    """A store that has seen 40 chats of two turns, 60 s apart, and 40 prompts that never return."""
    store = Store(lambda n: CostAware(np.zeros(1, state_dtype(512, 4096))), slots)
    for i in range(40):
        store.policy.prompt(keys([10_000 + 100 * i + k for k in range(4)]), 5.0 * i)
        store.policy.prompt(keys([50_000 + 100 * i + k for k in range(40)]), 5.0 * i)
    for i in range(40):
        store.policy.prompt(keys([10_000 + 100 * i + k for k in range(5)]), 5.0 * i + 60)
    store.policy.choose(store.table, 400.0, 1)
    return store


def test_cost_aware_learns_which_prompts_return() -> None:
    store = taught()
    store.prompt(list(range(1, 5)), 5000.0)
    store.prompt(list(range(100, 120)), 5001.0)  # longer, later, but its kind never returned
    assert set(store.choose(20, 5020.0)) == set(range(100, 120))


def test_cost_aware_gives_up_a_chat_whose_time_has_passed() -> None:
    store = taught()
    store.prompt([1, 2, 3, 4], 5000.0)
    store.prompt([5, 6, 7, 8], 5500.0)
    assert store.choose(4, 5520.0) == [4, 3, 2, 1]


def test_cost_aware_prefers_what_costs_more_to_compute() -> None:
    store = Store(MAKERS["cost-aware"])
    store.prompt([1], 0.0)
    store.prompt([2], 0.0)
    store.table["compute_s"][store.slot[1]] = 0.5
    assert store.choose(1, 10.0) == [2]


def test_cost_aware_takes_off_what_loading_takes_as_engines_have_measured_it() -> None:
    store = Store(lambda n: CostAware(np.zeros(1, state_dtype(64, 512))))
    store.prompt([1], 0.0)
    store.prompt([2], 0.0)
    store.table["compute_s"][store.slot[1]] = 0.5

    def ratio() -> float:
        worth = store.policy.worth(store.table, Forest(store.table), 10.0)
        return float(worth[store.slot[1]] / worth[store.slot[2]])

    assert ratio() == pytest.approx(0.5 / 0.05)
    store.policy.set_load_cost("dram", 0.04 / 1e6)
    assert ratio() == pytest.approx((0.5 - 0.04) / (0.05 - 0.04), rel=1e-6)


def test_cost_aware_keeps_a_beginning_that_many_share() -> None:
    store = Store(MAKERS["cost-aware"])
    for i in range(5):
        store.prompt([1, 2, 10 + i], float(i))
    store.prompt([50, 51, 52], 6.0)
    assert store.choose(8, 7.0)[-1] not in (1, 2)


def test_cost_aware_takes_unknown_costs_for_those_of_the_others() -> None:
    store = Store(MAKERS["cost-aware"])
    for block in (1, 2, 3):
        store.prompt([block], 0.0)
    store.table["compute_s"][store.slot[1]] = 0.0
    store.table["compute_s"][store.slot[2]] = 0.5
    assert store.choose(3, 10.0) == [3, 1, 2]


def test_cost_aware_forgets_what_a_load_took_with_its_history() -> None:
    policy = CostAware.create()
    for byte_s in (1e-9, float("nan"), float("inf"), -1.0):
        policy.set_load_cost("dram", byte_s)
    policy.set_load_cost("object", 1.0)
    assert (policy.seconds_per_byte("dram"), policy.seconds_per_byte("nvme")) == (1e-9, 0.0)
    policy.reset_history()
    assert policy.seconds_per_byte("dram") == 0.0


def test_cost_aware_state_may_be_handed_on() -> None:
    state = np.zeros(1, state_dtype(64, 512))
    first = Store(lambda n: CostAware(state))
    first.prompt([1, 2], 0.0)
    first.prompt([5], 1.0)
    second = CostAware(state)
    assert (
        second.choose(first.table, 5.0, 3).tolist()
        == first.policy.choose(first.table, 5.0, 3).tolist()
    )


def test_cost_aware_wants_sane_sizes() -> None:
    with pytest.raises(ValueError, match="multiple of 8"):
        state_dtype(16, 12)
