"""An engine's frontend that takes streams up where another replica left them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing
from typing import Any

from vllm import RequestOutput, SamplingParams
from vllm.config import VllmConfig
from vllm.exceptions import VLLMValidationError
from vllm.outputs import STREAM_FINISHED
from vllm.v1.engine.async_llm import AsyncLLM

from headrace_decode.replay.checks import check
from headrace_decode.replay.feed import MOST_SEEDED, feed, output_of, why_not, with_said
from headrace_decode.replay.recorder import RECORDER, Recorder
from headrace_decode.replay.said import Output, tokens_of
from headrace_kvstore.connector.identity import BOUNDED_KEY, SPARSE_KEY

SCHEDULERS = {
    False: "headrace_decode.replay.scheduler.TakingUp",
    True: "headrace_decode.replay.scheduler.TakingUpAsync",
}
OFFLOADING_SCHEDULERS = {
    False: "headrace_decode.sparse.engine.offload.scheduler.OffloadingTakingUp",
    True: "headrace_decode.sparse.engine.offload.scheduler.OffloadingTakingUpAsync",
}
"""Of engines whose KV may leave the cache; they do what those of `SCHEDULERS` do."""
BOUNDING_SCHEDULERS = {
    False: "headrace_decode.bounded.engine.scheduler.BoundingTakingUp",
    True: "headrace_decode.bounded.engine.scheduler.BoundingTakingUpAsync",
}
"""Of engines whose requests may drop KV; they do what those of `OFFLOADING_SCHEDULERS` do."""
WORKER = "headrace_decode.replay.worker.TakingUpWorker"
PLATFORM_WORKERS = frozenset(
    {"vllm.v1.worker.cpu_worker.CPUWorker", "vllm.v1.worker.gpu_worker.Worker"}
)
"""Those in whose place `WORKER` can stand."""
OUR_WORKERS = frozenset(
    {
        WORKER,
        "headrace_decode.speculation.drafting_worker.SpeculatingWorker",
        "headrace.reuse_workers.ReusingTakingUpWorker",
        "headrace.reuse_workers.ReusingSpeculatingWorker",
        "headrace.reuse_workers.SparseReusingTakingUpWorker",
        "headrace.reuse_workers.SparseReusingSpeculatingWorker",
        "headrace_decode.sparse.engine.worker.SparseTakingUpWorker",
        "headrace_decode.sparse.engine.worker.SparseSpeculatingWorker",
    }
)
"""`WORKER` and its subclasses."""

Generate = Callable[..., AsyncGenerator[RequestOutput, None]]


class Again:
    """One request on its second way: what was said, and what of it the serving layer gets.

    Attributes:
        choices: the engine's requests for those that have not ended.
    """

    def __init__(self, outputs: list[Output]) -> None:
        self.outputs = outputs
        self.choices: list[Any] = []
        self._given: dict[int, dict[int, RequestOutput]] = {}

    def give(self, index: int, given: dict[int, RequestOutput]) -> None:
        """What the serving layer gets for one choice, by the number of the output."""
        self._given[index] = given

    def take(self) -> Iterator[RequestOutput]:
        """All of it, each output once and with its choices in their order."""
        all_given, self._given = self._given, {}
        for number, output in enumerate(self.outputs if all_given else ()):
            parts = [
                given[number]
                for index in dict.fromkeys(said.index for said in output)
                if number in (given := all_given.get(index, {}))
            ]
            for part in parts[1:]:
                parts[0].add(part, aggregate=True)
            yield from parts[:1]


class TakingUpLLM(AsyncLLM):
    """vLLM's, with our schedulers and workers where they can stand."""

    def __init__(self, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> None:
        self._cannot = _prepare(vllm_config)
        self._draws_again = not vllm_config.use_v2_model_runner
        self._again: dict[str, Again] = {}
        super().__init__(vllm_config, *args, **kwargs)

    async def recorded(
        self,
        prompt: Any,
        params: SamplingParams,
        run: Callable[[Generate], AsyncGenerator[Any, None]],
    ) -> AsyncGenerator[RequestOutput, None]:
        """A request's outputs, with those said elsewhere before them, told to its `Recorder`.

        Args:
            run: runs the request, given what asks the engine (`AsyncLLM.generate`).
        """
        recorder = RECORDER.get()
        if recorder is None:
            async with aclosing(run(super().generate)) as outputs:
                async for output in outputs:
                    yield output
            return
        again = Again(recorder.begin(self._cannot or why_not(prompt, params)))
        left = MOST_SEEDED if params.seed is not None and self._draws_again else None
        plain = super().generate

        def taking_up(
            prompt: Any, params: SamplingParams, name: str, **kwargs: Any
        ) -> AsyncGenerator[RequestOutput, None]:
            return self._taking_up(again, name, plain(prompt, params, name, **kwargs))

        async with aclosing(run(taking_up if again.outputs else plain)) as outputs:
            async for output in outputs:
                for earlier in again.take():
                    left = _tell(recorder, earlier, left)
                    yield earlier
                left = _tell(recorder, output, left)
                yield output
        for earlier in again.take():  # nothing was left to say
            _tell(recorder, earlier, left)
            yield earlier

    async def _taking_up(
        self, again: Again, name: str, outputs: AsyncGenerator[RequestOutput, None]
    ) -> AsyncGenerator[RequestOutput, None]:
        self._again[name] = again
        try:
            async with aclosing(outputs):
                async for output in outputs:
                    yield output
        finally:
            self._again.pop(name, None)

    async def _add_request(
        self, request: Any, prompt: str | None, parent_req: Any, index: int, queue: Any
    ) -> None:
        """As vLLM's. One that was taken up is led through what it said before the engine gets it,
        and the engine does not get choices that had ended."""
        again = self._again.get(request.external_req_id)
        if again is None:
            await super()._add_request(request, prompt, parent_req, index, queue)
            return
        choices = 1 if parent_req is None else parent_req.n
        if index == 0:
            await asyncio.to_thread(self._check, request, again.outputs, choices)
        self.output_processor.add_request(request, prompt, parent_req, index, queue)
        again.choices.append(request)
        try:
            given, ended = await feed(
                self.output_processor, queue, request.request_id, index, again.outputs
            )
        except BaseException:  # the client may have left
            known = [each.request_id for each in again.choices]
            self.output_processor.abort_requests(known, internal=True)
            raise
        again.give(index, given)
        if ended:
            again.choices.pop()
        else:
            said = tokens_of(again.outputs, index)
            request.sampling_params = with_said(request.sampling_params, said)
        if index < choices - 1:
            return  # what the engine says of one choice would come among what others said
        for each in again.choices:
            await self.engine_core.add_request_async(each)
        if not self.output_processor.external_req_ids.get(request.external_req_id):
            queue.put(STREAM_FINISHED)

    def _check(self, request: Any, outputs: list[Output], choices: int) -> None:
        """Whether this engine can go on behind what the request is told to have said.

        Raises:
            VLLMValidationError: it cannot.
        """
        params = request.sampling_params
        room = self.model_config.max_model_len - len(request.prompt_token_ids or ())
        try:
            if self._draws_again and params.seed is not None and _said(outputs) > MOST_SEEDED:
                raise ValueError(f"it has a seed and more than {MOST_SEEDED} tokens")
            check(
                outputs,
                choices=choices,
                most_tokens=min(params.max_tokens or room, room) - 1,
                vocabulary=self.model_config.get_vocab_size(),
                logprobs=params.num_logprobs,
            )
        except ValueError as error:
            raise VLLMValidationError(f"the stream cannot be taken up: {error}") from error


def _tell(recorder: Recorder, output: RequestOutput, left: int | None) -> int | None:
    """Record an output; how many tokens may still be said, if there is a limit."""
    said = output_of(output)
    recorder.add(said)
    if left is not None:
        left -= sum(len(one.tokens) for one in said)
        if left < 0:
            recorder.stop(f"it has a seed and more than {MOST_SEEDED} tokens")
    return left


def _said(outputs: list[Output]) -> int:
    return sum(len(said.tokens) for output in outputs for said in output)


def _prepare(config: VllmConfig) -> str | None:
    """Put our scheduler and worker in; why that cannot be, if so."""
    scheduler, parallel = config.scheduler_config, config.parallel_config
    if scheduler.scheduler_cls is not None:
        return f"the engine runs with scheduler_cls {scheduler.scheduler_cls}"
    if not config.use_v2_model_runner:
        if parallel.worker_cls in PLATFORM_WORKERS:
            parallel.worker_cls = WORKER
        elif parallel.worker_cls not in OUR_WORKERS:
            return f"the engine runs with worker_cls {parallel.worker_cls}"
    told = config.additional_config if isinstance(config.additional_config, dict) else {}
    offloads = (told.get(SPARSE_KEY) or {}).get("offload_gib")
    schedulers = OFFLOADING_SCHEDULERS if offloads else SCHEDULERS
    schedulers = BOUNDING_SCHEDULERS if BOUNDED_KEY in told else schedulers
    scheduler.scheduler_cls = schedulers[bool(scheduler.async_scheduling)]
    return None
