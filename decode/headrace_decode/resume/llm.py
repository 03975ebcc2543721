"""An engine's frontend that resumes streams of another replica."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, suppress
from contextvars import ContextVar
from typing import Any

from vllm import RequestOutput, SamplingParams
from vllm.config import VllmConfig
from vllm.exceptions import VLLMValidationError
from vllm.outputs import STREAM_FINISHED
from vllm.sampling_params import SamplingType
from vllm.v1.engine.async_llm import AsyncLLM

from headrace_decode.resume.checks import check
from headrace_decode.resume.feed import MAX_SEEDED, feed, output_of, why_not, with_said
from headrace_decode.resume.recorder import RECORDER, Recorder
from headrace_decode.resume.said import Output, cached_tokens_of, is_over, tokens_of
from headrace_engine.connector.identity.engine_identity import BOUNDED_KEY, SPARSE_KEY
from headrace_engine.handoff import PARAMS_KEY

SCHEDULERS = {
    False: "headrace_decode.resume.scheduler.TakingUp",
    True: "headrace_decode.resume.scheduler.TakingUpAsync",
}
OFFLOADING_SCHEDULERS = {
    False: "headrace_decode.sparse.engine.offload.scheduler.OffloadingTakingUp",
    True: "headrace_decode.sparse.engine.offload.scheduler.OffloadingTakingUpAsync",
}
"""Schedulers of engines that may offload KV; they include the work of `SCHEDULERS`."""
BOUNDING_SCHEDULERS = {
    False: "headrace_decode.compression.engine.scheduler.BoundingTakingUp",
    True: "headrace_decode.compression.engine.scheduler.BoundingTakingUpAsync",
}
"""Schedulers of engines whose requests may drop KV; they include the work of
`OFFLOADING_SCHEDULERS`."""
WORKER = "headrace_decode.resume.worker.TakingUpWorker"
PLATFORM_WORKERS = frozenset(
    {"vllm.v1.worker.cpu_worker.CPUWorker", "vllm.v1.worker.gpu_worker.Worker"}
)
"""vLLM's worker classes, which `WORKER` can replace."""
OUR_WORKERS = frozenset(
    {
        WORKER,
        "headrace_decode.speculative.drafting_worker.SpeculatingWorker",
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


class ResumeState:
    """One submission of a resumed request to the engine.

    A request may be submitted several times: when its KV is late, a local prefill races the pull.
    Each submission feeds the outputs to its own requests, and sends only these to the engine.

    Attributes:
        outputs: the outputs of the lost replica's engine.
        choices: the engine's requests of this submission, without choices that have ended.
        is_fed: whether the outputs were fed to all choices.
    """

    def __init__(self, outputs: list[Output]) -> None:
        self.outputs = outputs
        self.choices: list[Any] = []
        self.is_fed = False
        self._given: dict[int, dict[int, RequestOutput]] = {}

    def add(self, index: int, given: dict[int, RequestOutput]) -> None:
        """Record the serving layer's outputs of one choice, by position in `outputs`."""
        self._given[index] = given

    def earlier(self) -> Iterator[RequestOutput]:
        """Yield each earlier output once, with its choices in the original order."""
        for number, output in enumerate(self.outputs):
            parts = [
                given[number]
                for index in dict.fromkeys(said.index for said in output)
                if number in (given := self._given.get(index, {}))
            ]
            for part in parts[1:]:
                parts[0].add(part, aggregate=True)
            yield from parts[:1]


STATE: ContextVar[ResumeState | None] = ContextVar("headrace_resume_state", default=None)
"""State of the submission that this task gives to the engine; None for a new request."""


class TakingUpLLM(AsyncLLM):
    """`AsyncLLM` with Headrace's schedulers and workers where the configuration permits them."""

    def __init__(self, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> None:
        self._cannot = _prepare(vllm_config)
        self._drafter = vllm_drafter(vllm_config)
        self._draws_again = not vllm_config.use_v2_model_runner
        super().__init__(vllm_config, *args, **kwargs)

    async def recorded(
        self,
        prompt: Any,
        params: SamplingParams,
        run: Callable[[Generate, bool], AsyncGenerator[Any, None]],
        correct: Callable[[RequestOutput], None] = lambda output: None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield a request's outputs, earlier ones first, and add them to its `Recorder`.

        Args:
            run: runs the request. It receives the function to call the engine with
                (`AsyncLLM.generate`), and whether the engine has nothing left to compute. It may
                call that function several times, each time with another request id.
            correct: sets the right number of cached tokens in each output of the engine.
        """
        recorder = RECORDER.get()
        if recorder is None:
            async with aclosing(run(super().generate, False)) as outputs:
                async for output in outputs:
                    correct(output)
                    yield output
            return
        said = recorder.begin(self._cannot or self._why_not(prompt, params))
        left = MAX_SEEDED if self._draws_again and _is_seeded(params) else None
        plain = super().generate
        states: dict[str, ResumeState] = {}

        def resuming(
            prompt: Any, params: SamplingParams, name: str, **kwargs: Any
        ) -> AsyncGenerator[RequestOutput, None]:
            states[name] = state = ResumeState(said)
            return _in_state(state, plain(prompt, params, name, **kwargs))

        over = is_over(said, params.n)
        async with aclosing(run(resuming if said else plain, over)) as outputs:
            async for output in outputs:
                correct(output)
                if states:
                    state = states[output.request_id]
                    states.clear()
                    for earlier in state.earlier():
                        left = _tell(recorder, earlier, left, cached_tokens_of(said))
                        earlier.num_cached_tokens = output.num_cached_tokens
                        yield earlier
                left = _tell(recorder, output, left, output.num_cached_tokens or 0)
                yield output
        for state in [one for one in states.values() if one.is_fed][:1]:  # no new output followed
            for earlier in state.earlier():
                earlier.num_cached_tokens = cached_tokens_of(said)
                left = _tell(recorder, earlier, left, cached_tokens_of(said))
                yield earlier

    async def _add_request(
        self, request: Any, prompt: str | None, parent_req: Any, index: int, queue: Any
    ) -> None:
        """Add a request, as vLLM does.

        The earlier outputs of a resumed request are fed to it before the engine gets it. The engine
        does not get choices that have ended.
        """
        state = STATE.get()
        if state is None:
            await super()._add_request(request, prompt, parent_req, index, queue)
            return
        choices = 1 if parent_req is None else parent_req.n
        is_sent = False
        try:
            if index == 0:
                await asyncio.to_thread(self._check, request, state.outputs, choices)
            self.output_processor.add_request(request, prompt, parent_req, index, queue)
            state.choices.append(request)
            given, ended = await feed(
                self.output_processor, queue, request.request_id, index, state.outputs
            )
            state.add(index, given)
            if ended:
                state.choices.pop()
            else:
                said = tokens_of(state.outputs, index)
                request.sampling_params = with_said(request.sampling_params, said)
            if index < choices - 1:
                return  # else an engine output of this choice comes before earlier ones of others
            for each in state.choices:
                is_sent = True
                await self.engine_core.add_request_async(each)
        except BaseException as error:  # the client may have left; the engine may have some choices
            with suppress(Exception):
                name = request.request_id if parent_req is None else parent_req.request_id
                await self.abort(name, internal=True)
            if not is_sent:
                await self._release_kv(request)
            if isinstance(error, ValueError):
                raise _wrong(error) from error
            raise
        state.is_fed = True
        if not state.choices:
            await self._release_kv(request)
            queue.put(STREAM_FINISHED)

    async def _release_kv(self, request: Any) -> None:
        """Tell the prefill engine that this engine will not pull a request's KV."""
        told = (request.sampling_params.extra_args or {}).get(PARAMS_KEY) or {}
        if told.get("do_remote_prefill"):
            with suppress(Exception):
                await AsyncLLM.notify_kv_transfer_request_rejected(
                    self, f"{request.request_id}-unused", told
                )

    def _why_not(self, prompt: Any, params: SamplingParams) -> str | None:
        """Return why this engine's stream cannot be resumed; None if it can."""
        return self._why_not_seeded(params) or why_not(prompt, params)

    def _why_not_seeded(self, params: SamplingParams) -> str | None:
        if self._drafter is None or not _is_seeded(params):
            return None
        return f"it has a seed, and vLLM's drafter {self._drafter} changes what that draws"

    def _check(self, request: Any, outputs: list[Output], choices: int) -> None:
        """Check that this engine can resume the request after its earlier outputs.

        Raises:
            ValueError: it cannot.
        """
        params = request.sampling_params
        room = self.model_config.max_model_len - len(request.prompt_token_ids or ())
        if why := self._why_not_seeded(params):
            raise ValueError(why)
        if self._draws_again and _is_seeded(params) and _said(outputs) > MAX_SEEDED:
            raise ValueError(f"it has a seed and more than {MAX_SEEDED} tokens")
        check(
            outputs,
            choices=choices,
            most_tokens=min(params.max_tokens or room, room) - 1,
            vocabulary=self.model_config.get_vocab_size(),
            logprobs=params.num_logprobs,
        )


async def _in_state(
    state: ResumeState, outputs: AsyncGenerator[RequestOutput, None]
) -> AsyncGenerator[RequestOutput, None]:
    """Yield the outputs of one submission, which is handed to the engine with this state."""
    async with aclosing(outputs):
        before = STATE.set(state)
        try:
            first = await anext(outputs, None)  # the engine gets the request before this output
        finally:
            STATE.reset(before)
        if first is not None:
            yield first
            async for output in outputs:
                yield output


def _wrong(error: ValueError) -> VLLMValidationError:
    return VLLMValidationError(f"the stream cannot be taken up: {error}")


def _is_seeded(params: SamplingParams) -> bool:
    """Return whether a request's tokens depend on its seed."""
    return bool(params.sampling_type == SamplingType.RANDOM_SEED)


def vllm_drafter(config: VllmConfig) -> str | None:
    """Return vLLM's own drafting method, which drafts for every request; None without one.

    Such a method changes how many random numbers a step draws, and which of them accept a draft.
    The same seed therefore gives other tokens if the steps of an answer begin at other tokens.
    Headrace's drafters do not draft for requests with a seed.
    """
    told = config.speculative_config
    return None if told is None or told.method == "custom_class" else str(told.method)


def _tell(
    recorder: Recorder, output: RequestOutput, left: int | None, cached_tokens: int
) -> int | None:
    """Record an output; the first one carries the number of cached tokens.

    Returns:
        How many more tokens the stream may have and still be resumed; None without such a limit.
    """
    said = output_of(output, 0 if recorder.has_told else cached_tokens)
    recorder.add(said)
    if left is not None:
        left -= sum(len(one.tokens) for one in said)
        if left < 0:
            recorder.stop(f"it has a seed and more than {MAX_SEEDED} tokens")
    return left


def _said(outputs: list[Output]) -> int:
    return sum(len(said.tokens) for output in outputs for said in output)


def _prepare(config: VllmConfig) -> str | None:
    """Set Headrace's scheduler and worker; return why that is impossible, or None."""
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
