"""vLLM's worker of this platform: its class, its connectors, its tensor-parallel ranks, the rows of
its batch, and seeded requests on CPUs.

`tests/unit/test_contracts_sparse.py`, `test_contracts_sparse_device.py` and
`test_contracts_blending.py` pin what is used here.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import torch
from vllm.distributed import get_tp_group
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.platforms import current_platform
from vllm.sampling_params import SamplingType

from headrace_engine.rank_group import RankGroup
from headrace_engine.vllm.scheduling import requests_gone

Row = TypeVar("Row")
MakeRow = Callable[[str, Any, int], Row]
"""(request id, sampling parameters or None, tokens of the prompt) -> the row."""


def worker_connectors() -> list[Any]:
    """Return this worker's connector, or the connectors within it."""
    if not has_kv_transfer_group():
        return []
    group = get_kv_transfer_group()
    return list(getattr(group, "_connectors", [group]))


def engine_ranks() -> RankGroup:
    """Return the tensor-parallel ranks of this worker's engine."""
    group = get_tp_group()
    return RankGroup(group.cpu_group if group.world_size > 1 else None)


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
    parameters, so these and the requests' blocks are taken from the scheduler's steps."""

    def __init__(self, make_row: MakeRow[Row]) -> None:
        self._make_row = make_row
        self._known: dict[str, Row] = {}
        self._blocks: dict[str, list[int]] = {}
        self._rows: list[Row] = []

    def begin_step(self, step: Any) -> None:
        """Follow a step of the scheduler. vLLM sends resumed requests as new ones."""
        from vllm.v1.worker.gpu.model_runner import sort_batch_req_ids

        for name in requests_gone(step):
            self._known.pop(name, None)
        for name in step.finished_req_ids:
            self._blocks.pop(name, None)
        cached = step.scheduled_cached_reqs
        for name, more in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if more is not None:
                self._blocks[name] += more[0]
        for new in step.scheduled_new_reqs:
            self._blocks[new.req_id] = list(new.block_ids[0])
            self._known[new.req_id] = self._make_row(
                new.req_id, new.sampling_params, new.prompt_len
            )
        order = sort_batch_req_ids(step.num_scheduled_tokens, {}, 1)
        self._rows = [self._known[name] for name in order]

    def rows(self) -> list[Row]:
        """Return the batch of the step in progress."""
        return self._rows

    def blocks(self, name: str) -> Sequence[int]:
        """Return a request's blocks of the scheduler; of a preempted one, those that it had."""
        return self._blocks[name]


class SeededPrompts:
    """Withholds the generators of seeded requests from steps that compute a part of a prompt.

    vLLM's first model runner samples a token in such a step, drops it, and rewinds the request's
    generator. Those of CPUs cannot be rewound, and the engine would end.

    Args:
        runner: the model runner of a CPU worker.
    """

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._withheld: dict[str, Any] = {}
        self._params: dict[str, Any] = {}

    def prepare(self, step: Any) -> Any:
        """Return a scheduler's step as the runner may compute it."""
        for name in step.finished_req_ids:
            self._withheld.pop(name, None)
            self._params.pop(name, None)
        cached = step.scheduled_cached_reqs
        for name, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            state = self._runner.requests[name]
            if state.generator is None and name not in self._withheld:
                continue
            if computed + step.num_scheduled_tokens[name] < state.num_tokens:
                self._withhold(name, state)
            elif name in self._withheld:
                self._give_back(name, state)
        if not any(self._is_partly_computed(new, step) for new in step.scheduled_new_reqs):
            return step
        step = copy.copy(step)
        step.scheduled_new_reqs = [self._begun(new, step) for new in step.scheduled_new_reqs]
        return step

    def _is_partly_computed(self, new: Any, step: Any) -> bool:
        params, end = new.sampling_params, new.num_computed_tokens
        return (
            params is not None
            and params.sampling_type == SamplingType.RANDOM_SEED
            and end + step.num_scheduled_tokens[new.req_id] < len(new.prompt_token_ids or ())
        )

    def _begun(self, new: Any, step: Any) -> Any:
        """Return a new request that draws without a seed if the step computes a part of it."""
        if not self._is_partly_computed(new, step):
            return new
        generator = torch.Generator(device="cpu")
        generator.manual_seed(new.sampling_params.seed)
        self._withheld[new.req_id], self._params[new.req_id] = generator, new.sampling_params
        begun = copy.copy(new)
        begun.sampling_params = new.sampling_params.clone()
        begun.sampling_params.seed = None
        vars(begun.sampling_params).pop("sampling_type", None)  # kept from the first look at it
        return begun

    def _withhold(self, name: str, state: Any) -> None:
        if state.generator is not None:
            self._withheld[name], state.generator = state.generator, None
        batch = self._runner.input_batch
        if (row := batch.req_id_to_index.get(name)) is not None:
            batch.generators.pop(row, None)

    def _give_back(self, name: str, state: Any) -> None:
        state.generator = self._withheld.pop(name)
        state.sampling_params = self._params.pop(name, state.sampling_params)
        batch = self._runner.input_batch
        if (row := batch.req_id_to_index.get(name)) is not None:
            batch.generators[row] = state.generator


if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker

    class PlatformWorker(CPUWorker):
        """vLLM's worker for CPUs, for seeded requests of any length."""

        _seeded: SeededPrompts | None = None

        def execute_model(self, scheduler_output: Any) -> Any:
            """Run a step like vLLM."""
            if self.use_v2_model_runner:  # which draws by seed and position, without generators
                return super().execute_model(scheduler_output)
            if self._seeded is None:
                self._seeded = SeededPrompts(self.model_runner)
            return super().execute_model(self._seeded.prepare(scheduler_output))

else:
    from vllm.v1.worker.gpu_worker import Worker as PlatformWorker  # type: ignore[no-redef]

__all__ = ["PlatformWorker"]
