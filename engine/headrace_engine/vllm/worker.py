"""vLLM's worker of this platform: its class, its connectors, and the rows of its batch.

`tests/unit/test_contracts_sparse.py`, `test_contracts_sparse_device.py` and
`test_contracts_blending.py` pin what is used here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.platforms import current_platform

from headrace_engine.vllm.scheduling import requests_gone

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as PlatformWorker
else:
    from vllm.v1.worker.gpu_worker import Worker as PlatformWorker

__all__ = ["PlatformWorker"]

Row = TypeVar("Row")
MakeRow = Callable[[str, Any, int], Row]
"""(request id, sampling parameters or None, tokens of the prompt) -> the row."""


def worker_connectors() -> list[Any]:
    """Return this worker's connector, or the connectors within it."""
    if not has_kv_transfer_group():
        return []
    group = get_kv_transfer_group()
    return list(getattr(group, "_connectors", [group]))


class RunnerRows(Generic[Row]):
    """Rows of vLLM's first model runner."""

    def __init__(self, runner: Any, make_row: MakeRow[Row]) -> None:
        self._runner, self._make_row = runner, make_row

    def begin_step(self, step: Any) -> None:
        """Do nothing, since the runner follows steps itself."""

    def rows(self) -> list[Row]:
        """Return the batch of the step in progress."""
        return [self._row(name) for name in self._runner.input_batch.req_ids]

    def blocks(self, name: str) -> Sequence[int]:
        """Return a request's blocks of the scheduler."""
        found: Sequence[int] = self._runner.requests[name].block_ids[0]
        return found

    def _row(self, name: str) -> Row:
        request = self._runner.requests[name]
        return self._make_row(name, request.sampling_params, request.num_prompt_tokens)


class FollowedRows(Generic[Row]):
    """Rows of vLLM's second model runner, in engines without drafts. The runner keeps no sampling
    parameters, so these are taken from the scheduler's steps."""

    def __init__(self, make_row: MakeRow[Row]) -> None:
        self._make_row = make_row
        self._known: dict[str, Row] = {}
        self._rows: list[Row] = []

    def begin_step(self, step: Any) -> None:
        """Follow a step of the scheduler. vLLM sends resumed requests as new ones."""
        from vllm.v1.worker.gpu.model_runner import sort_batch_req_ids

        for name in requests_gone(step):
            self._known.pop(name, None)
        for new in step.scheduled_new_reqs:
            self._known[new.req_id] = self._make_row(
                new.req_id, new.sampling_params, new.prompt_len
            )
        order = sort_batch_req_ids(step.num_scheduled_tokens, {}, 1)
        self._rows = [self._known[name] for name in order]

    def rows(self) -> list[Row]:
        """Return the batch of the step in progress."""
        return self._rows
