"""The real frontend of a decode replica over an engine that is a fake.

Real are vLLM's `AsyncLLM.generate` and `OutputProcessor`, our `PlannedLLM` and `PrefillExecutor`,
and the lines between the events. The engine core does as vLLM's: it ends when it gets a request
twice.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.metrics.stats import PrefillStats

from headrace_decode.llm.planned_llm import PlannedLLM, Planning
from headrace_decode.planning.fanout_limiter import FanoutLimiter
from headrace_decode.planning.prefill_executor import PrefillExecutor
from headrace_decode.resume.recorder import RecordingMiddleware
from headrace_decode.resume.scheduler import resume_tokens_of
from headrace_engine.kv_transfer.handoff import PARAMS_KEY, PrefillRequest, PrefillResult
from headrace_engine.meter import EngineMeter
from headrace_engine.step_time import StepTime
from headrace_engine.vllm.llm import intercept_requests
from tests.support.prefill_executor import NEVER_S, PULL, RESULT, Planner, gate_for_one

VOCABULARY = 1000
STEP_S = 0.002


def token(prompt: list[int], place: int) -> int:
    """The token that the engine says at a place."""
    return (sum(prompt) + 7 * place) % VOCABULARY


def text(prompt: list[int], tokens: int) -> list[int]:
    """The tokens of a whole answer."""
    return [token(prompt, place) for place in range(tokens)]


@dataclass
class Core:
    """An engine core in the place of vLLM's.

    Attributes:
        kv: what becomes of a pull: `comes`, `never` or `fails`.
        runs: whether it makes steps.
        added: ids of the requests that came, in their order.
        aborted: likewise of those that were.
        released: parameters of KV that nobody pulls.
        running: those that have not ended, with the places of their next tokens.
        cached_tokens: of each prompt, what the engine says that it did not compute.
    """

    kv: str = "comes"
    runs: bool = True
    cached_tokens: int = 0
    added: list[str] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    released: list[Any] = field(default_factory=list)
    running: dict[str, tuple[EngineCoreRequest, int]] = field(default_factory=dict)
    resources: Any = field(default_factory=lambda: SimpleNamespace(engine_dead=False))
    fail: Callable[[str], None] = lambda name: None
    steps: int = 0

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        if request.abort_immediately:
            assert request.sampling_params is not None
            self.released.append((request.sampling_params.extra_args or {})[PARAMS_KEY])
            return
        self.added.append(request.request_id)
        if request.request_id in self.running:
            self.die()
            return
        self.running[request.request_id] = request, len(resume_tokens_of(request.sampling_params))

    async def abort_requests_async(self, names: list[str]) -> None:
        for name in names:
            self.aborted.append(name)
            self.running.pop(name, None)

    async def get_supported_tasks_async(self) -> tuple[str, ...]:
        return ("generate",)

    async def get_output_async(self) -> EngineCoreOutputs:
        while True:
            await asyncio.sleep(STEP_S)
            if self.resources.engine_dead:
                raise EngineDeadError
            if self.runs and (outputs := self._step()):
                self.steps += 1
                return EngineCoreOutputs(outputs=outputs)

    def die(self) -> None:
        """End, as the process does."""
        self.resources.engine_dead = True
        self.running.clear()

    def shutdown(self, timeout: float | None = None) -> None:
        """Nothing runs elsewhere."""

    def _step(self) -> list[EngineCoreOutput]:
        outputs = []
        for name, (request, place) in list(self.running.items()):
            params = request.sampling_params
            assert params is not None and params.max_tokens and request.prompt_token_ids
            pulls = PARAMS_KEY in (params.extra_args or {})
            if pulls and self.kv == "never":
                continue
            if pulls and self.kv == "fails":
                del self.running[name]
                self.fail(name)
                continue
            last = place + 1 == params.max_tokens
            said = [token(request.prompt_token_ids, place)]
            finish = FinishReason.LENGTH if last else None
            stats = PrefillStats(num_cached_tokens=self.cached_tokens)
            outputs.append(EngineCoreOutput(name, said, finish_reason=finish, prefill_stats=stats))
            if last:
                del self.running[name]
            else:
                self.running[name] = request, place + 1
        return outputs


class Inputs:
    """vLLM's input processor, for prompts that are token ids."""

    assign_request_id = staticmethod(InputProcessor.assign_request_id)

    def process_inputs(
        self, request_id: str, prompt: Any, params: SamplingParams, **kwargs: Any
    ) -> EngineCoreRequest:
        return EngineCoreRequest(
            request_id=request_id,
            prompt_token_ids=list(prompt["prompt_token_ids"]),
            mm_features=None,
            sampling_params=params.clone(),
            pooling_params=None,
            arrival_time=time.time(),
            lora_request=None,
            cache_salt=prompt.get("cache_salt"),
            data_parallel_rank=None,
        )


@dataclass
class PrefillSide:
    """The prefill replicas.

    Attributes:
        does: `answers`, `fails` or `hangs`.
        asked: the requests that came.
    """

    does: str = "answers"
    asked: list[PrefillRequest] = field(default_factory=list)

    async def call(self, request: PrefillRequest) -> PrefillResult:
        self.asked.append(request)
        if self.does == "hangs":
            await asyncio.sleep(NEVER_S)
        if self.does == "fails":
            raise ConnectionError("no prefill replica")
        return RESULT


class Frontend(PlannedLLM):
    """`PlannedLLM` without the parts that start processes.

    Args:
        core: the engine.
        planner: None for an engine that runs each request at once.
    """

    def __init__(
        self, core: Core, planner: Planner | None = None, prefill: PrefillSide | None = None
    ) -> None:
        self.engine_core: Any = core
        intercept_requests(self, self._send_to_engine)
        self.output_processor: Any = OutputProcessor(None, log_stats=False)
        self.input_processor: Any = Inputs()
        self.renderer: Any = SimpleNamespace(mm_processor_cache=None, stat_mm_cache=lambda: None)
        self.model_config: Any = SimpleNamespace(
            max_model_len=4096, get_vocab_size=lambda: VOCABULARY, is_encoder_decoder=False
        )
        cache = SimpleNamespace(kv_sharing_fast_prefill=False, num_gpu_blocks=1000, block_size=16)
        self.vllm_config: Any = SimpleNamespace(
            speculative_config=None,
            lora_config=None,
            cache_config=cache,
            scheduler_config=SimpleNamespace(max_num_queued_reqs=None, max_num_queued_tokens=None),
        )
        self.scheduler_config = self.vllm_config.scheduler_config
        self.output_handler = None
        self.logger_manager = None
        self.log_stats = self.log_requests = False
        self.why_not_resumable = self._drafter = None
        self.cached_tokens: list[int] = []
        self._redraws_seeded = self._identifies_media = True
        self.fanout, self.lossy_store = FanoutLimiter(StepTime()), ""
        self._lossy_modes, self._compresses_prompts = {}, False
        self.meter = EngineMeter()
        self.planning = None
        if planner is not None:
            self.planning = Planning(
                PrefillExecutor(planner),
                (prefill or PrefillSide()).call,
                self.meter,
                gate_for_one(),
            )
        core.fail = self._fail

    def __del__(self) -> None:
        """Nothing to shut down."""

    async def stop(self) -> None:
        """End the task that reads the engine's outputs."""
        if self.output_handler is not None:
            self.output_handler.cancel()
            await asyncio.wait({self.output_handler})

    def _fail(self, name: str) -> None:
        self.output_processor.request_states[name].queue.put(RuntimeError("the pull failed"))

    def assert_idle(self) -> None:
        """Assert that nothing of any request is left."""
        core, processor = self.engine_core, self.output_processor
        assert not core.running, core.running
        assert not processor.request_states and not processor.external_req_ids
        assert not processor.parent_requests
        if self.planning is not None:
            executor = self.planning.executor
            assert not executor._active and not executor._pulls


class Completions:
    """ASGI: a serving layer in the place of vLLM's, which streams token ids.

    Args:
        llm: answers.
        pad: bytes that each event has beside its tokens, for clients that are slow.
    """

    def __init__(self, llm: Frontend, pad: int = 0) -> None:
        self._llm, self._pad = llm, "x" * pad
        self._numbers = itertools.count()
        self.well = True

    def app(self) -> RecordingMiddleware:
        """With the lines between the events."""
        return RecordingMiddleware(self)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            return
        if scope["path"] == "/health":
            status = 200 if self.well and not self._llm.errored else 503
            await send({"type": "http.response.start", "status": status, "headers": []})
            await send({"type": "http.response.body", "body": b""})
            return
        asked = await _body(receive)
        answering = asyncio.ensure_future(self._answer(asked, send))
        leaving = asyncio.ensure_future(_left(receive))
        await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
        for task in (leaving, answering):
            task.cancel()
        await asyncio.wait({answering, leaving})

    async def _answer(self, asked: dict[str, Any], send: Any) -> None:
        params = SamplingParams(
            max_tokens=asked["max_tokens"],
            n=asked.get("n", 1),
            output_kind=RequestOutputKind.DELTA,
        )
        prompt = {"type": "token", "prompt_token_ids": asked["prompt"]}
        head = [(b"content-type", b"text/event-stream")]
        begun = False
        last = b"data: [DONE]\n\n"
        outputs = self._llm.generate(prompt, params, f"r{next(self._numbers)}")
        try:
            async with aclosing(outputs):
                async for output in outputs:
                    if not begun:
                        begun = True
                        await send({"type": "http.response.start", "status": 200, "headers": head})
                    for choice in output.outputs:
                        said = {"index": choice.index, "token_ids": list(choice.token_ids)}
                        event = {"choices": [said], "pad": self._pad}
                        body = b"data: " + json.dumps(event).encode() + b"\n\n"
                        await send({"type": "http.response.body", "body": body, "more_body": True})
        except Exception as error:
            document = {"error": {"message": repr(error), "code": 500}}
            last = b"data: " + json.dumps(document).encode() + b"\n\n"
        if not begun:
            await send({"type": "http.response.start", "status": 200, "headers": head})
        await send({"type": "http.response.body", "body": last})


async def _body(receive: Any) -> dict[str, Any]:
    parts, more = [], True
    while more:
        message = await receive()
        parts.append(message.get("body", b""))
        more = message.get("more_body", False)
    return dict(json.loads(b"".join(parts)))


async def _left(receive: Any) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


__all__ = ["PULL", "Completions", "Core", "Frontend", "PrefillSide", "text", "token"]
