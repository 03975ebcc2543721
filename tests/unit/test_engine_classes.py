"""Which scheduler and worker classes a decode engine gets."""

from __future__ import annotations

from pkgutil import resolve_name
from types import SimpleNamespace
from typing import Any

import pytest

from headrace_decode.llm.engine_classes import choose_engine_classes
from headrace_engine.extensions.extension import EXTENSIBLE_SCHEDULERS, EXTENSIBLE_WORKER
from headrace_engine.extensions.scheduler import SchedulerWithExtensions
from headrace_engine.extensions.worker import WorkerWithExtensions
from headrace_engine.vllm.scheduling import AsyncScheduler, Scheduler

VLLMS = "vllm.v1.worker.cpu_worker.CPUWorker"


class ExtendedWorker(WorkerWithExtensions):
    """A worker class of an operator's own that runs our extensions."""


class OtherWorker:
    pass


def config(worker: str = VLLMS, scheduler: Any = None) -> Any:
    """Return a configuration as vLLM completes it."""
    return SimpleNamespace(
        scheduler_config=SimpleNamespace(scheduler_cls=scheduler, async_scheduling=True),
        parallel_config=SimpleNamespace(worker_cls=worker),
        use_v2_model_runner=False,
    )


@pytest.mark.parametrize("ahead", [False, True])
def test_an_engine_gets_the_classes_that_run_extensions(ahead: bool) -> None:
    one = config()
    one.scheduler_config.async_scheduling = ahead
    assert choose_engine_classes(one) is None
    assert one.scheduler_config.scheduler_cls == EXTENSIBLE_SCHEDULERS[ahead]
    assert one.parallel_config.worker_cls == EXTENSIBLE_WORKER


@pytest.mark.parametrize(
    ("worker", "why"),
    [
        (f"{__name__}.ExtendedWorker", None),
        (f"{__name__}.OtherWorker", f"the engine runs with worker_cls {__name__}.OtherWorker"),
    ],
)
def test_another_worker_class_stays_and_says_whether_it_resumes_requests(
    worker: str, why: str | None
) -> None:
    one = config(worker)
    assert choose_engine_classes(one) == why
    assert one.parallel_config.worker_cls == worker
    assert (one.scheduler_config.scheduler_cls is None) == (why is not None)


def test_the_second_model_runner_needs_no_worker_of_ours() -> None:
    one = config("mine.Worker")
    one.use_v2_model_runner = True
    assert choose_engine_classes(one) is None
    assert one.parallel_config.worker_cls == "mine.Worker"


def test_an_operators_scheduler_stays() -> None:
    one = config(scheduler="mine.Scheduler")
    assert choose_engine_classes(one) == "the engine runs with scheduler_cls mine.Scheduler"
    assert one.scheduler_config.scheduler_cls == "mine.Scheduler"


def test_the_named_classes_exist() -> None:
    for path, ahead in zip(
        EXTENSIBLE_SCHEDULERS.values(), (Scheduler, AsyncScheduler), strict=True
    ):
        assert issubclass(resolve_name(path), ahead) and issubclass(
            resolve_name(path), SchedulerWithExtensions
        )
    assert issubclass(resolve_name(EXTENSIBLE_WORKER), WorkerWithExtensions)
