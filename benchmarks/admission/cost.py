"""Cost of admission for a request in the gateway: with an empty queue, and with a long one."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable
from typing import Any

from benchmarks.emptycluster import EmptyCluster
from headrace.config.gateway import AdmissionSettings
from headrace.gateway.admission.admission_controller import AdmissionController
from headrace.gateway.admission.admission_queue import AdmissionQueue
from headrace.gateway.admission.capacity import Capacity, compute_capacity
from headrace.gateway.admission.slo_classes import SloClass
from headrace.gateway.backend import ReplicaInfo
from headrace.gateway.replica_pool import ReplicaPool
from headrace.router.cluster import Cluster
from headrace.router.placement.cluster_view import ClusterView
from headrace.router.plan import RouterSettings
from headrace_engine.step_time import StepTime

ENGINES, REQUESTS, ROUNDS = 32, 2000, 7
SLO = SloClass("interactive", ttft_target_s=1e6)


class _Known(Cluster):
    """A cluster whose engines are idle."""

    def __init__(self) -> None:
        super().__init__(RouterSettings())
        self._view = _view()

    @property
    def fitted(self) -> bool:
        return True


class _Nobody(EmptyCluster):
    """Lists no replicas."""

    async def replicas(self) -> list[ReplicaInfo]:
        return []


def _view() -> ClusterView:
    view = ClusterView(16, 131_072)
    for number in range(ENGINES):
        role = "prefill" if number % 2 else "decode"
        row = view.add(f"{role}-{number}", role, view.node(f"node-{number // 8}"))  # type: ignore[arg-type]
        view.set_steps(row, StepTime())
    return view


def _median(call: Callable[[], int]) -> float:
    """Return the microseconds for each of the things that a call does, median of `ROUNDS`."""
    took = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        count = call()
        took.append((time.perf_counter() - began) / count * 1e6)
    return statistics.median(took)


def measure(report: dict[str, Any]) -> None:
    """Microseconds; see `docs/admission-measurements.md`."""
    asyncio.run(_measure(report))


async def _measure(report: dict[str, Any]) -> None:
    settings = AdmissionSettings(max_waiting=100_000)
    pool = ReplicaPool(_Nobody())
    admission_queue = AdmissionQueue(settings, pool, _Known(), one_tenant=False)
    names = [f"tenant-{number}" for number in range(100)]

    async def pass_through() -> float:
        began = time.perf_counter()
        for number in range(REQUESTS):
            ticket = await admission_queue.enter(names[number % 100], SLO, 4000)
            admission_queue.on_end(ticket, 1e-6, 1.0)  # prompts that take nothing: the room stays
        return (time.perf_counter() - began) / REQUESTS * 1e6

    report["pass_us"] = statistics.median([await pass_through() for _ in range(ROUNDS)])
    view = _view()

    def look() -> int:
        for _ in range(200):
            compute_capacity(view, 0.0, prompt_tokens=512.0, itl_s=0.05)
        return 200

    report["look_us"] = _median(look)
    for waiting in (100, 1000):
        report[f"arrive_us_{waiting}_wait"] = _waiting(waiting, names)


def _waiting(waiting: int, names: list[str]) -> float:
    closed = Capacity()

    def arrivals() -> int:
        core = AdmissionController(1 << 20)
        core.set_engines(priced=True, engines=ENGINES)
        for number in range(waiting):
            core.arrive(names[number % 10], SLO, 4000, 0.0, closed)
        began = time.perf_counter()
        for number in range(200):
            ticket = core.arrive(names[number % 10], SLO, 4000, 0.0, closed)
            core.cancel(ticket, 0.0)  # type: ignore[arg-type]
        took.append((time.perf_counter() - began) / 200 * 1e6)
        return 1

    took: list[float] = []
    for _ in range(ROUNDS):
        arrivals()
    return statistics.median(took)
