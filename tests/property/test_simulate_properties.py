"""Whatever is played: tokens add up, time runs forward, no KV is used before it is there."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace_lab.simulate import event_loop, known_blocks
from headrace_lab.simulate.cluster_state import ClusterState, EnginePair, PromptRequest
from headrace_lab.simulate.hardware import Engine, Hardware, prefill_s
from headrace_lab.simulate.policy_catalog import find_policy, names
from headrace_lab.simulate.run import Failure, SimulationRun, SimulationSettings, simulate
from headrace_lab.simulate.state import DONE
from headrace_lab.simulate.trace import BLOCK_TOKENS, Trace, Workload
from tests.support.plain_engine import Request, play

EASY = settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow], derandomize=True)


def workload(seed: int, count: int, seconds: float, longest: int = 4000) -> Workload:
    """Random prompts over a few shared beginnings."""
    rng = Random(seed)
    prompt, output, chains, fresh = [], [], [], iter(range(1000, 10**6))
    families = [[100 * f + n for n in range(12)] for f in range(3)]
    for _ in range(count):
        tokens = rng.randint(1, longest)
        shared = rng.choice(families)[: rng.randint(0, 6)]
        full = tokens // BLOCK_TOKENS
        chains.append((shared + [next(fresh) for _ in range(full)])[:full])
        prompt.append(tokens)
        output.append(rng.choice([1, 2, rng.randint(1, 600)]))
    numbers: dict[int, int] = {}
    keys = [numbers.setdefault(key, len(numbers)) for chain in chains for key in chain]
    arrival = np.sort([rng.uniform(0.0, seconds) for _ in range(count)])
    trace = Trace(
        arrival_s=arrival,
        prompt=np.array(prompt, np.int32),
        output=np.array(output, np.int32),
        starts=np.concatenate([[0], np.cumsum([len(chain) for chain in chains])]).astype(np.int64),
        keys=np.array(keys, np.int32),
        distinct=len(numbers) + 1,
        tick_s=0.0,
    )
    rows, offset = np.arange(count, dtype=np.int32), np.zeros(count, np.int64)
    return Workload(trace, arrival, rows, offset, seconds, trace.distinct)


def hardware(
    blocks: int, step_tokens: int, store: int = 0, per_node: int = 2, mixed: bool = False
) -> Hardware:
    one = Engine(kv_blocks=blocks, step_tokens=step_tokens, max_requests=8)
    block_bytes = BLOCK_TOKENS * 131_072
    return Hardware(
        prefill=one,
        decode=one,
        engines_per_node=per_node,
        mixed_nodes=mixed,
        store_bytes=store * block_bytes,
    )


def anywhere(cluster: ClusterState, request: PromptRequest, rng: Random) -> EnginePair:
    """A policy that does what it likes."""
    p = rng.randrange(cluster.prefills + 1) if cluster.prefills else 0
    d = rng.randrange(cluster.prefills, len(cluster.node))
    return EnginePair(None if p == cluster.prefills else p, d)


def check(run: SimulationRun) -> None:
    s, req = run.state, run.state.req
    assert (req["phase"] == DONE).all()
    assert (req["emitted"] == req["output"]).all()
    assert s.eng["answer_tokens"].sum() == req["output"].sum()
    assert (req["begun_s"] >= req["arrival_s"]).all()
    assert (req["first_s"] > req["begun_s"]).all()
    assert (req["end_s"] >= req["first_s"]).all()
    holders = s.kv.of[:-1]
    assert (holders["plain"] == 0).all()
    assert (holders["held"] == holders["idle"]).all()
    assert (holders["held"] <= np.diff(s.kv.of["first"])).all()
    for name in ("waiting", "inside", "running", "chunks", "joins", "context", "queue_tokens"):
        assert (s.eng[name] == 0).all(), name
    for name in ("sent_requests", "sent_tokens", "sent_blocks"):
        assert (s.eng[name] == 0).all(), name


@EASY
@given(
    seed=st.integers(0, 10**6),
    engines=st.tuples(st.integers(0, 3), st.integers(1, 3)),
    blocks=st.integers(10, 40),
    step_tokens=st.sampled_from([64, 512, 2048]),
    store=st.sampled_from([0, 12, 100]),
    mixed=st.booleans(),
)
def test_every_request_ends_once_and_all_is_given_back(
    seed: int, engines: tuple[int, int], blocks: int, step_tokens: int, store: int, mixed: bool
) -> None:
    work = workload(seed, 40, 2.0)
    machines = hardware(blocks, step_tokens, store, mixed=mixed)
    run = simulate(work, machines, *engines, anywhere, SimulationSettings(seed=seed))
    check(run)
    req = run.state.req
    calm = req["preempted"] == 0
    made = req["cached"] + req["loaded"] + req["computed"]
    assert (made == req["prompt"])[calm].all()
    assert (req["computed"] >= 1).all()
    curve = machines.prefill.curve
    for one in req[calm]:
        alone_s = prefill_s(curve, int(one["computed"]), int(one["prompt"]), step_tokens)
        moved_s = 0.0
        if one["p"] >= 0:
            moved_s = machines.handoff_s + machines.transfer_fixed_s
            moved_s += one["moved"] * machines.kv_bytes_per_token / machines.inside_bytes_s
        assert one["first_s"] >= one["begun_s"] + alone_s + moved_s - 1e-9


@EASY
@given(seed=st.integers(0, 10**6), count=st.integers(1, 4))
def test_failures_cost_time_and_no_request(seed: int, count: int) -> None:
    rng = Random(seed)
    failures = [Failure(rng.uniform(0.0, 3.0), rng.randrange(4), 1.0) for _ in range(count)]
    settings_ = SimulationSettings(seed=seed, failures=failures, detect_s=0.1)
    check(simulate(workload(seed, 30, 2.0), hardware(30, 512, 50), 2, 2, anywhere, settings_))


@EASY
@given(
    seed=st.integers(0, 10**6),
    blocks=st.integers(10, 30),
    step_tokens=st.sampled_from([64, 512, 2048]),
    seconds=st.sampled_from([0.1, 2.0, 20.0]),
)
def test_one_engine_does_as_one_that_is_played_step_by_step(
    seed: int, blocks: int, step_tokens: int, seconds: float
) -> None:
    work = workload(seed, 25, seconds)
    machines = hardware(blocks, step_tokens)
    run = simulate(work, machines, 0, 1, anywhere)
    trace = work.trace
    plain = [
        Request(
            float(trace.arrival_s[n]),
            int(trace.prompt[n]),
            int(trace.output[n]),
            trace.keys[trace.starts[n] : trace.starts[n + 1]].tolist(),
        )
        for n in range(len(trace))
    ]
    side = machines.decode
    play(plain, side.steps, side.kv_blocks, side.step_tokens, side.max_requests)
    req = run.state.req
    assert req["first_s"] == pytest.approx([one.first_s for one in plain], abs=1e-6)
    assert req["end_s"] == pytest.approx([one.end_s for one in plain], abs=1e-6)
    assert req["preempted"].tolist() == [one.preempted for one in plain]


@pytest.mark.parametrize("name", names())
def test_a_policy_serves_everything_and_the_same_seed_gives_the_same_run(name: str) -> None:
    work, machines = workload(3, 60, 3.0), hardware(40, 512, 200)
    first, second = (
        simulate(work, machines, 2, 3, find_policy(name), SimulationSettings(seed=5))
        for _ in range(2)
    )
    check(first)
    assert first.outcome == second.outcome


def test_what_the_router_knows_is_what_the_engines_hold() -> None:
    work, machines = workload(7, 80, 4.0), hardware(20, 512, 30)
    seen: dict[str, known_blocks.KnownBlocks] = {}

    def keep(cluster: ClusterState, request: PromptRequest, rng: Random) -> EnginePair:
        return anywhere(cluster, request, rng)

    original = known_blocks.new_known_blocks

    def new_known_blocks(capacities: list[int], *, ahead: int) -> known_blocks.KnownBlocks:
        seen["known"] = original(capacities, ahead=ahead)
        return seen["known"]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(known_blocks, "new_known_blocks", new_known_blocks)
        run = simulate(work, machines, 2, 2, keep)
    s, told = run.state, seen["known"]
    known_blocks.apply_changes(told, s.ev, float("inf"))
    slots = told.rows.slot
    for holder in range(told.holders):
        first, last = s.kv.of["first"][holder : holder + 2]
        there = {int(key) for key in s.kv.slot["key"][first:last] if key >= 0}
        word, bit = divmod(holder, 64)
        noted = {
            int(slots["key"][row])
            for row in range(len(slots))
            if slots["key"][row] >= 0 and int(told.bits[row, word]) >> bit & 1
        }
        assert noted == there


def test_an_engine_that_is_dead_takes_nothing() -> None:
    work = workload(1, 20, 2.0)
    failures = [Failure(0.0, 0, 100.0)]
    run = simulate(
        work,
        hardware(40, 512),
        2,
        2,
        find_policy("round-robin"),
        SimulationSettings(failures=failures),
    )
    check(run)
    assert run.state.eng["prompt_tokens"][0] == 0
    assert event_loop.GONE not in run.state.req["d"]


def test_more_engines_serve_faster() -> None:
    work = workload(2, 60, 0.5)
    few, many = (
        simulate(work, hardware(40, 512), n, n, find_policy("headrace")).outcome for n in (1, 4)
    )
    assert many.ttft_mean < few.ttft_mean
    assert replace(many, ttft_mean=0.0) != replace(few, ttft_mean=0.0)
