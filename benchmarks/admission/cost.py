"""Cost of admission for a request in the gateway: with an empty queue, and with a long one."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable
from typing import Any

from benchmarks.emptycluster import EmptyCluster
from headrace.gateway.admission.admission import Admission
from headrace.gateway.admission.classes import AdmissionOptions, SloClass
from headrace.gateway.admission.door import Door
from headrace.gateway.admission.room import Room, room_of
from headrace.gateway.backend import ReplicaInfo
from headrace.gateway.replicas import ReplicaPool
from headrace.router.cluster import Cluster
from headrace.router.plan import RouterSettings
from headrace.router.view import View
from headrace_engine.steptime import StepTime

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


def _view() -> View:
    view = View(16, 131_072)
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
    """Microseconds; see `docs/admission.md`."""
    asyncio.run(_measure(report))


async def _measure(report: dict[str, Any]) -> None:
    options = AdmissionOptions({"interactive": SLO}, max_waiting=1 << 20)
    pool = ReplicaPool(_Nobody())
    door = Door(options, pool, _Known(), one_tenant=False)
    names = [f"tenant-{number}" for number in range(100)]

    async def pass_through() -> float:
        began = time.perf_counter()
        for number in range(REQUESTS):
            ticket = await door.enter(names[number % 100], SLO, 4000)
            door.left(ticket, 1e-6, 1.0)  # prompts that take nothing: the room stays
        return (time.perf_counter() - began) / REQUESTS * 1e6

    report["pass_us"] = statistics.median([await pass_through() for _ in range(ROUNDS)])
    view = _view()

    def look() -> int:
        for _ in range(200):
            room_of(view, 0.0, prompt_tokens=512.0, itl_s=0.05)
        return 200

    report["look_us"] = _median(look)
    for waiting in (100, 1000):
        report[f"arrive_us_{waiting}_wait"] = _waiting(waiting, names)


def _waiting(waiting: int, names: list[str]) -> float:
    closed = Room()

    def arrivals() -> int:
        core = Admission(1 << 20)
        core.price(known=True, engines=ENGINES)
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
