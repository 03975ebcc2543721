"""The gateway's admission before simulated engines: who comes is answered, or refused at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from headrace.gateway.admission.admission_controller import LATE
from headrace.gateway.admission.slo_classes import SloClass
from headrace_lab.simulate.hardware import Hardware
from headrace_lab.simulate.headrace_policy import HeadracePolicy
from headrace_lab.simulate.run import SimulationRun, SimulationSettings
from headrace_lab.simulate.scenarios.admission import Admitted, Tenancy, simulate_admitted
from headrace_lab.simulate.state import DONE
from headrace_lab.simulate.trace import Trace, scale_trace

QUICK = SloClass("quick", ttft_target_s=2.0, itl_target_s=0.05)
BATCH = SloClass("batch", background=True, max_wait_s=600.0)
TARGET_S = 2.0


def trace(requests: int = 200, prompt: int = 8192, seconds: float = 40.0) -> Trace:
    """Prompts of new tokens, each of which takes about 0.28 s."""
    blocks = prompt // 512
    return Trace(
        np.linspace(0.0, seconds, requests),
        np.full(requests, prompt, np.int32),
        np.full(requests, 20, np.int32),
        np.arange(requests + 1, dtype=np.int64) * blocks,
        np.arange(requests * blocks, dtype=np.int32),
        requests * blocks,
        0.1,
    )


def alone(count: int) -> NDArray[np.int64]:
    return np.zeros(count, np.int64)


def every(period: int) -> Callable[[int], NDArray[np.int64]]:
    """Each so-manieth request is of a second tenant."""
    return lambda count: (np.arange(count) % period == 0).astype(np.int64)


def play(
    rate: float,
    tenants: Callable[[int], NDArray[np.int64]] = alone,
    slo: Sequence[SloClass] = (QUICK,),
    gateways: int = 1,
) -> tuple[NDArray[np.int64], SimulationRun, Admitted]:
    work = scale_trace(trace(), rate, 40.0, 1)
    tenancy = Tenancy(tenants(len(work)), slo, gateways)
    settings = SimulationSettings(drain_s=60.0)
    run, told = simulate_admitted(work, Hardware(), 1, 1, HeadracePolicy(), tenancy, settings)
    return tenancy.tenant, run, told


def test_below_what_engines_can_take_nobody_is_refused() -> None:
    _, run, told = play(0.4)
    assert not told.refused.any() and not told.expired.any()
    assert (run.state.req["phase"] == DONE).all()


def test_above_it_all_that_are_admitted_come_in_time_and_engines_stay_busy() -> None:
    _, run, told = play(2.0)
    done = run.state.req["phase"] == DONE
    assert told.refused.mean() > 0.4 and told.expired.mean() < 0.01
    assert (done == ~(told.refused | told.expired)).all()
    ttft = (run.state.req["first_s"] - run.state.req["arrival_s"])[done]
    assert float(ttft.max()) <= LATE * TARGET_S
    assert run.outcome.prefill_use > 0.8
    assert np.nanmin(told.retry_s) >= 0.0


@pytest.mark.parametrize("gateways", [1, 2])
def test_a_tenant_with_ten_times_the_requests_of_another_gets_no_more(gateways: int) -> None:
    tenant, run, _ = play(20.0, every(11), gateways=gateways)
    done = run.state.req["phase"] == DONE
    assert 0.7 < done[tenant == 0].sum() / done[tenant == 1].sum() < 1.4


def test_a_background_tenant_fills_what_others_leave_and_takes_nothing_from_them() -> None:
    tenant, run, told = play(1.2, every(2), (QUICK, BATCH))
    batch, done = tenant == 1, run.state.req["phase"] == DONE
    assert done[~batch].mean() > 0.95 and not told.refused[~batch].any()
    assert done[batch].sum() > 10
    waited_s = told.queued_s[~batch]
    assert float(np.nanpercentile(waited_s, 90)) < 0.6  # two prompts ahead, and no more


def test_the_same_seed_gives_the_same_run() -> None:
    (_, one, first), (_, other, second) = play(1.5), play(1.5)
    assert one.outcome == other.outcome and (first.refused == second.refused).all()
