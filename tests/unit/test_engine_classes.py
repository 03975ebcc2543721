"""Which scheduler and worker classes a decode engine gets."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from headrace_decode.llm import engine_classes
from headrace_decode.llm.engine_classes import (
    COMPRESSION_SCHEDULERS,
    OFFLOADING_SCHEDULERS,
    SCHEDULERS,
    WORKER,
    choose_engine_classes,
)
from headrace_engine.connector.identity.engine_identity import BOUNDED_KEY, SPARSE_KEY

VLLMS = "vllm.v1.worker.cpu_worker.CPUWorker"


class ResumingWorker:
    resumes_requests = True


class OtherWorker:
    pass


def config(worker: str = VLLMS, scheduler: Any = None, **additional: Any) -> Any:
    """Return a configuration as vLLM completes it."""
    return SimpleNamespace(
        scheduler_config=SimpleNamespace(scheduler_cls=scheduler, async_scheduling=True),
        parallel_config=SimpleNamespace(worker_cls=worker),
        use_v2_model_runner=False,
        additional_config=additional,
    )


@pytest.mark.parametrize(
    ("additional", "schedulers"),
    [
        ({}, SCHEDULERS),
        ({SPARSE_KEY: {"offload_gib": 0}}, SCHEDULERS),
        ({SPARSE_KEY: {"offload_gib": 2}}, OFFLOADING_SCHEDULERS),
        ({BOUNDED_KEY: {}}, COMPRESSION_SCHEDULERS),
        ({SPARSE_KEY: {"offload_gib": 2}, BOUNDED_KEY: {}}, COMPRESSION_SCHEDULERS),
    ],
)
def test_the_techniques_choose_the_scheduler(
    additional: dict[str, Any], schedulers: dict[bool, str]
) -> None:
    one = config(**additional)
    assert choose_engine_classes(one) is None
    assert one.scheduler_config.scheduler_cls == schedulers[True]
    assert one.parallel_config.worker_cls == WORKER


@pytest.mark.parametrize(
    ("worker", "why"),
    [
        (f"{__name__}.ResumingWorker", None),
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
    for paths in (SCHEDULERS, OFFLOADING_SCHEDULERS, COMPRESSION_SCHEDULERS):
        for path in paths.values():
            assert engine_classes.resolve_name(path).has_combined_grammar_backend
    assert engine_classes.resolve_name(WORKER).resumes_requests
