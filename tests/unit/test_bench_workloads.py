"""The serving benchmark asks every arm the same amount, and never the same text twice."""

import pytest

from benchmarks.serving.workloads import (
    ARMS,
    WORKLOADS,
    Cell,
    allowance_s,
    cells,
    conversations,
    one_more,
    predicted_s,
    rotated,
)


def short(clients: int = 8, count: int = 16) -> Cell:
    return Cell(WORKLOADS["short"], clients, count, warmup=1)


def test_a_cell_has_the_name_that_its_figures_carry() -> None:
    assert short().name == "short.c8"


def test_prompts_differ_by_arm_repeat_request_and_cell() -> None:
    texts = [
        talk.users[0]
        for cell in (short(1), short(8))
        for arm in ARMS
        for repeat in range(3)
        for talk in conversations(cell, 20, seed=0, scope=f"{arm}/{repeat}")
    ]
    assert len({" ".join(text.split()[:6]) for text in texts}) == len(texts)


def test_the_same_seed_gives_the_same_prompts_and_another_seed_others() -> None:
    def ask(seed: int) -> list[str]:
        return [t.users[0] for t in conversations(short(), 4, seed=seed, scope="vllm/0")]

    assert ask(1) == ask(1)
    assert set(ask(1)).isdisjoint(ask(2))


def test_only_the_shared_workload_shares_and_it_shares_the_system_prompt() -> None:
    cell = Cell(WORKLOADS["shared"], 8, 8, warmup=1)
    talks = [
        talk
        for arm in ARMS
        for repeat in range(2)
        for talk in conversations(cell, 8, seed=0, scope=f"{arm}/{repeat}")
    ]
    assert len({talk.system for talk in talks}) == 1
    users = [user for talk in talks for user in talk.users]
    assert len(set(users)) == len(users)
    for name in ("short", "long"):
        alone = conversations(Cell(WORKLOADS[name], 1, 2, 1), 2, seed=0, scope="x")
        assert {talk.system for talk in alone} == {None}


@pytest.mark.parametrize(("name", "words"), [("short", 20), ("long", 1970), ("shared", 31)])
def test_prompts_have_the_length_their_workload_says(name: str, words: int) -> None:
    cell = Cell(WORKLOADS[name], 1, 3, 1)
    for talk in conversations(cell, 3, seed=0, scope="x"):
        assert [len(user.split()) for user in talk.users] == [words] * cell.workload.turns


def test_a_warm_up_may_take_fewer_turns() -> None:
    cell = Cell(WORKLOADS["shared"], 8, 8, warmup=1)
    assert [len(t.users) for t in conversations(cell, 2, turns=1, seed=0, scope="x")] == [1, 1]


@pytest.mark.parametrize("quick", [True, False])
def test_every_cell_gives_each_client_something_to_do(quick: bool) -> None:
    plan = cells(list(WORKLOADS), [1, 8], quick=quick)
    assert [cell.name for cell in plan] == [f"{w}.c{c}" for w in WORKLOADS for c in (1, 8)]
    for cell in plan:
        assert cell.conversations % cell.concurrency == 0
        assert cell.warmup >= 1 or cell.name == "long.c8"


def test_one_repeat_of_all_cells_fits_the_quick_run_on_a_slow_machine() -> None:
    """11 minutes, less 4 for three arms to start, on one thread a step; two arms have two."""
    plan = cells(list(WORKLOADS), [1, 8], quick=True)
    assert 3 * sum(predicted_s(cell, cell.requests + cell.warmup) for cell in plan) < 7 * 60


def test_prefill_of_a_long_prompt_is_what_a_long_cell_costs() -> None:
    cell = Cell(WORKLOADS["long"], 8, 8, 1)
    assert predicted_s(cell, 8) == pytest.approx(8 * (0.05 + 4.2) + 31 * (0.05 + 0.0168))
    assert predicted_s(cell, 0) == 0


def test_every_cell_is_sure_of_one_repeat_and_what_is_left_is_dealt_out_evenly() -> None:
    assert allowance_s([10, 60, 30], left_s=160) == 10 + 20
    assert allowance_s([30], left_s=90) == 90
    assert allowance_s([10, 60, 30], left_s=50) == 10


def test_a_cell_is_measured_once_whatever_it_costs_then_while_it_fits_its_share() -> None:
    assert one_more(done=0, longest_s=0, spent_s=50, share_s=-10, most=3)
    assert one_more(done=1, longest_s=10, spent_s=15, share_s=25, most=3)
    assert not one_more(done=1, longest_s=10, spent_s=16, share_s=25, most=3)
    assert not one_more(done=3, longest_s=1, spent_s=3, share_s=100, most=3)


def test_each_repeat_begins_with_another_arm() -> None:
    assert [rotated(ARMS, number)[0] for number in range(5)] == [*ARMS, ARMS[0]]
    assert sorted(rotated(ARMS, 2)) == sorted(ARMS)
