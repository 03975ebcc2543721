"""An engine's frontend that resumes streams of another replica."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, suppress
from contextvars import ContextVar
from typing import Any

from msgspec.structs import replace
from vllm import RequestOutput, SamplingParams
from vllm.config import VllmConfig
from vllm.exceptions import VLLMValidationError
from vllm.outputs import STREAM_FINISHED
from vllm.sampling_params import SamplingType
from vllm.v1.engine.async_llm import AsyncLLM

from headrace_decode.resume.emitted import (
    EmittedOutput,
    all_finished,
    cached_tokens_of,
    media_of,
    tokens_of_choice,
)
from headrace_decode.resume.emitted_checks import check_outputs
from headrace_decode.resume.output_replay import (
    MAX_SEEDED,
    emitted_output,
    replay_outputs,
    why_not_resumable,
    with_resume_tokens,
)
from headrace_decode.resume.recorder import RECORDER, OutputRecorder
from headrace_engine.kv_transfer.handoff import PARAMS_KEY
from headrace_engine.kv_transfer.media import features_of, media_digest
from headrace_engine.vllm.kv_cache import identifies_media
from headrace_engine.vllm.llm import SendRequest, intercept_requests, request_state

Generate = Callable[..., AsyncGenerator[RequestOutput, None]]


class ResumeState:
    """One submission of a resumed request to the engine.

    A request may be submitted several times: when its KV is late, a local prefill races the pull.
    Each submission replays the outputs for its own requests, and sends only these to the engine.

    Attributes:
        outputs: the outputs of the lost replica's engine.
        choices: the engine's requests of this submission, without choices that have ended.
        is_replayed: whether the outputs were replayed for all choices.
    """

    def __init__(self, outputs: list[EmittedOutput]) -> None:
        self.outputs = outputs
        self.choices: list[Any] = []
        self.is_replayed = False
        self._replayed: dict[int, dict[int, RequestOutput]] = {}

    def add(self, index: int, replayed: dict[int, RequestOutput]) -> None:
        """Record the serving layer's outputs of one choice, by position in `outputs`."""
        self._replayed[index] = replayed

    def earlier_outputs(self) -> Iterator[RequestOutput]:
        """Yield each earlier output once, with its choices in the original order."""
        for number, output in enumerate(self.outputs):
            parts = [
                replayed[number]
                for index in dict.fromkeys(choice.index for choice in output)
                if number in (replayed := self._replayed.get(index, {}))
            ]
            for part in parts[1:]:
                parts[0].add(part, aggregate=True)
            yield from parts[:1]


STATE: ContextVar[ResumeState | None] = ContextVar("headrace_resume_state", default=None)
"""State of the submission that this task gives to the engine; None for a new request."""


class ResumableLLM(AsyncLLM):
    """`AsyncLLM` that records the outputs of streams, and resumes streams of other replicas.

    Args:
        why_not_resumable: why no stream of this engine can be resumed; None if its scheduler, and
            with vLLM's first model runner its worker, run extensions.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        *args: Any,
        why_not_resumable: str | None = None,
        **kwargs: Any,
    ) -> None:
        self.why_not_resumable = why_not_resumable
        self._drafter = vllm_drafter(vllm_config)
        self._redraws_seeded = not vllm_config.use_v2_model_runner
        self._identifies_media = identifies_media(vllm_config)
        super().__init__(vllm_config, *args, **kwargs)
        intercept_requests(self, self._send_to_engine)

    async def recorded(
        self,
        prompt: Any,
        params: SamplingParams,
        run: Callable[[Generate, bool], AsyncGenerator[Any, None]],
        correct: Callable[[RequestOutput], None] = lambda output: None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield a request's outputs, earlier ones first, and add them to its `OutputRecorder`.

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
        resumed = recorder.begin(self.why_not_resumable or self._why_not(prompt, params))
        media = media_digest(features_of(prompt)).hex()
        if resumed and media_of(resumed) != media:
            raise VLLMValidationError(
                "the stream cannot be resumed: its images, sound or video are others now"
            )
        cached_tokens = cached_tokens_of(resumed)
        left = MAX_SEEDED if self._redraws_seeded and _is_seeded(params) else None
        generate = super().generate
        states: dict[str, ResumeState] = {}

        def generate_resumed(
            prompt: Any, params: SamplingParams, name: str, **kwargs: Any
        ) -> AsyncGenerator[RequestOutput, None]:
            states[name] = state = ResumeState(resumed)
            return _in_state(state, generate(prompt, params, name, **kwargs))

        is_finished = all_finished(resumed, params.n)
        async with aclosing(run(generate_resumed if resumed else generate, is_finished)) as outputs:
            async for output in outputs:
                correct(output)
                if states:
                    state = states[output.request_id]
                    states.clear()
                    for earlier in state.earlier_outputs():
                        left = _record(recorder, earlier, left, cached_tokens, media)
                        earlier.num_cached_tokens = output.num_cached_tokens
                        yield earlier
                left = _record(recorder, output, left, output.num_cached_tokens or 0, media)
                yield output
        replayed = [state for state in states.values() if state.is_replayed]
        for state in replayed[:1]:  # no new output followed
            for earlier in state.earlier_outputs():
                earlier.num_cached_tokens = cached_tokens
                left = _record(recorder, earlier, left, cached_tokens, media)
                yield earlier

    async def _send_to_engine(self, request: Any, send: SendRequest) -> None:
        """Send one choice of a request to the engine.

        The earlier outputs of a resumed request are replayed first. The engine does not get choices
        that have ended.
        """
        state = STATE.get()
        if state is None or request.abort_immediately:
            await send(request)
            return
        added = request_state(self, request.request_id)
        if added is None:
            return  # it was aborted while an earlier choice was replayed
        parent, index, queue = added.parent_req, added.request_index, added.queue
        choices = 1 if parent is None else parent.n
        is_sent = False
        try:
            if index == 0:
                await asyncio.to_thread(self._check, request, state.outputs, choices)
            state.choices.append(request)
            replayed, has_ended = await replay_outputs(
                self.output_processor, queue, request.request_id, index, state.outputs
            )
            state.add(index, replayed)
            if has_ended:
                state.choices.pop()
            else:
                tokens = tokens_of_choice(state.outputs, index)
                request.sampling_params = with_resume_tokens(request.sampling_params, tokens)
            if index < choices - 1:
                return  # else an engine output of this choice comes before earlier ones of others
            for each in state.choices:
                is_sent = True
                await send(each)
        except BaseException as error:  # the client may have left; the engine may have some choices
            with suppress(Exception):
                name = request.request_id if parent is None else parent.request_id
                await self.abort(name, internal=True)
            if not is_sent:
                await self._release_kv(request)
            if isinstance(error, ValueError):
                raise VLLMValidationError(f"the stream cannot be resumed: {error}") from error
            raise
        state.is_replayed = True
        if not state.choices:
            await self._release_kv(request)
            queue.put(STREAM_FINISHED)

    async def _release_kv(self, request: Any) -> None:
        """Tell the prefill engine that this engine will not pull a request's KV."""
        params = (request.sampling_params.extra_args or {}).get(PARAMS_KEY) or {}
        if params.get("do_remote_prefill"):
            with suppress(Exception):
                await AsyncLLM.notify_kv_transfer_request_rejected(
                    self, f"{request.request_id}-unused", params
                )

    def _why_not(self, prompt: Any, params: SamplingParams) -> str | None:
        """Return why this request's stream cannot be resumed; None if it can."""
        identifies = self._identifies_media
        return self._why_not_seeded(params) or why_not_resumable(prompt, params, identifies)

    def _why_not_seeded(self, params: SamplingParams) -> str | None:
        if self._drafter is None or not _is_seeded(params):
            return None
        return f"it has a seed, and vLLM's drafter {self._drafter} changes what that draws"

    def _check(self, request: Any, outputs: list[EmittedOutput], choices: int) -> None:
        """Check that this engine can resume the request after its earlier outputs.

        Raises:
            ValueError: it cannot.
        """
        params = request.sampling_params
        room = self.model_config.max_model_len - len(request.prompt_token_ids or ())
        if why := self._why_not_seeded(params):
            raise ValueError(why)
        tokens = sum(len(choice.tokens) for output in outputs for choice in output)
        if self._redraws_seeded and _is_seeded(params) and tokens > MAX_SEEDED:
            raise ValueError(f"it has a seed and more than {MAX_SEEDED} tokens")
        check_outputs(
            outputs,
            choices=choices,
            max_tokens=min(params.max_tokens or room, room) - 1,
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


def _is_seeded(params: SamplingParams) -> bool:
    """Return whether a request's tokens depend on its seed."""
    return bool(params.sampling_type == SamplingType.RANDOM_SEED)


def vllm_drafter(config: VllmConfig) -> str | None:
    """Return vLLM's own drafting method, which drafts for every request; None without one.

    Such a method changes how many random numbers a step draws, and which of them accept a draft.
    The same seed therefore gives other tokens if the steps of an answer begin at other tokens.
    Headrace's drafters do not draft for requests with a seed.
    """
    settings = config.speculative_config
    if settings is None or settings.method == "custom_class":
        return None
    return str(settings.method)


def _record(
    recorder: OutputRecorder,
    output: RequestOutput,
    left: int | None,
    cached_tokens: int,
    media: str,
) -> int | None:
    """Record an output; the first one carries the number of cached tokens, the media's digest and
    the adapter.

    Args:
        left: how many more tokens the stream may have and still be resumed; None without a limit.

    Returns:
        The same number after this output.
    """
    first = (0, "") if recorder.has_output else (cached_tokens, media)
    emitted = emitted_output(output, *first)
    if emitted and recorder.adapter and not recorder.has_output:
        emitted = (replace(emitted[0], adapter=recorder.adapter), *emitted[1:])
    recorder.add(emitted)
    if left is not None:
        left -= sum(len(choice.tokens) for choice in emitted)
        if left < 0:
            recorder.stop(f"it has a seed and more than {MAX_SEEDED} tokens")
    return left
