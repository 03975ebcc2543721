"""Messages between the scheduler's side and the worker's side of the store's connector."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from headrace_engine.connector.store_work import StoreWork
from headrace_engine.vllm.connectors import KVConnectorMetadata, KVConnectorWorkerMetadata
from headrace_kvstore.protocol.wire import BadBlock


class StepSample(NamedTuple):
    """Seconds of a step that computed prompts, without waits for KV; the rest as `StepShape`."""

    prompt: int
    rows: int
    draft: int
    context: int
    pairs: int
    seconds: float


class LoadSample(NamedTuple):
    """Seconds that a load of blocks from one medium took, or would have taken."""

    medium: str
    blocks: int
    seconds: float


@dataclass
class StepMetadata(KVConnectorMetadata):
    """Message from the scheduler's side to the worker's side."""

    work: StoreWork


@dataclass
class WorkerReport(KVConnectorWorkerMetadata):
    """Message from the worker's side to the scheduler's side.

    Attributes:
        jobs: how many workers ended each save job.
        bad_in_files: blocks whose bytes in files were wrong.
        samples: durations of steps and loads.
    """

    jobs: dict[int, int]
    bad_in_files: list[BadBlock]
    samples: list[StepSample | LoadSample]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        assert isinstance(other, WorkerReport)
        jobs = dict(self.jobs)
        for job, workers in other.jobs.items():
            jobs[job] = jobs.get(job, 0) + workers
        bad = list(dict.fromkeys(self.bad_in_files + other.bad_in_files))
        return WorkerReport(jobs, bad, slowest(self.samples, other.samples))


def slowest(
    mine: list[StepSample | LoadSample], theirs: list[StepSample | LoadSample]
) -> list[StepSample | LoadSample]:
    """Merge the samples of two workers: for the same step or load, keep the slower one's.

    Workers may report a step or load at different times: an asynchronous load may end with a
    different step on each worker, and a device's time is read when it is available.
    """
    found, others = [], list(theirs)
    for each in mine:
        same = next((i for i, other in enumerate(others) if other[:-1] == each[:-1]), None)
        pair = [each] if same is None else [each, others.pop(same)]
        found.append(max(pair, key=lambda one: one.seconds))
    return found + others
