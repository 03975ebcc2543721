"""The decode engine: an `AsyncLLM` whose `generate` goes through the orchestrator.

Every request passes through `generate`, below vLLM's OpenAI layer, with its prompt as token ids.
Chat, completions, tools and structured output are therefore planned in the same way, and vLLM
itself answers them. `tests/unit/test_contracts.py` checks the parts of vLLM that are used here.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from http import HTTPStatus
from typing import Any

import cloudpickle
import numpy as np
import vllm
from vllm import RequestOutput, SamplingParams
from vllm.config import VllmConfig
from vllm.exceptions import GracefulHTTPError, VLLMValidationError
from vllm.v1.engine.async_llm import AsyncLLM

from headrace_decode._vllm_request import (
    grammar_failed,
    grammar_of,
    lossy_of,
    why_local,
    with_drafting_facts,
    with_grammar,
    with_share,
    with_technique,
    with_tenant,
    with_transfer_params,
    without_reserved,
)
from headrace_decode.apis.usage import USAGE, CachedTokens
from headrace_decode.compression.engine.settings import settings_of as bounded_settings_of
from headrace_decode.grammars.trials import GrammarRefused, GrammarTrials, TrialUnfinished
from headrace_decode.guard import why_refused
from headrace_decode.internal import PLAN, TENANT
from headrace_decode.orchestrate import Orchestrator, Plan, Work
from headrace_decode.renderer import register
from headrace_decode.rendering.keys import RENDER_ONLY, Prompt, Rendered
from headrace_decode.resume.llm import Generate, TakingUpLLM
from headrace_decode.resume.recorder import RECORDER
from headrace_decode.resume.said import cached_tokens_of, tokens_of
from headrace_decode.reusing import Reuse, Reusing, reusing_work
from headrace_decode.sparse.engine.settings import settings_of
from headrace_decode.techniques import (
    BOUNDED,
    REUSE,
    SPARSE,
    Apart,
    TechniqueError,
    apart_of,
    offered,
    reuse_share,
)
from headrace_decode.tenants import ALL_ALIKE, Tenants
from headrace_decode.turns import PROMPTS, Turns
from headrace_engine.gate import ComputeGate
from headrace_engine.handoff import PARAMS_KEY, REUSE_KEY, PrefillRequest, PrefillResult
from headrace_engine.meter import EngineMeter
from headrace_engine.ray.engine import MeteredVLLMEngine
from headrace_engine.serving.techniques import unsupported
from headrace_engine.steptime import StepTime
from headrace_engine.tracing import span
from headrace_kvstore.salts import is_marked, tenant_of

logger = logging.getLogger("headrace.decode")

PrefillCall = Callable[[PrefillRequest], Awaitable[PrefillResult]]


@dataclass(frozen=True)
class Planning:
    """The parts with which a decode engine plans its requests and carries out the plans."""

    orchestrator: Orchestrator
    prefill_call: PrefillCall
    """Call that prefills a prompt at another engine."""
    meter: EngineMeter
    gate: ComputeGate
    tenants: Tenants = ALL_ALIKE
    reusing: Reusing | None = None
    """Chooser of stored KV to reuse at other positions; None without reuse."""
    itl_target_s: float | None = None
    """Target step time, which drafts must not exceed; None without a target."""


class PlannedLLM(TakingUpLLM):
    """An engine that plans each request before it runs it.

    Args:
        planning: makes the engine's planning from the configuration of the started engine; None
            for an engine that runs each request immediately.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        *args: Any,
        planning: Callable[[VllmConfig], Planning] | None = None,
        **kwargs: Any,
    ) -> None:
        register()
        super().__init__(vllm_config, *args, **kwargs)
        self.planning = None if planning is None else planning(vllm_config)
        step_time = StepTime() if self.planning is None else self.planning.meter.step_time
        self.turns = Turns(step_time)
        self.lossy = lossy_of(vllm_config)
        sparse = settings_of(vllm_config.additional_config)
        bounded = bounded_settings_of(vllm_config.additional_config)
        self._apart = {
            name: (told.mode, told.share)
            for name, told in ((SPARSE, sparse), (BOUNDED, bounded))
            if told is not None
        }
        self._stream = bounded is not None and bounded.stream
        self._own_tokenizer: Any = None
        # vLLM parses each grammar on the event loop. The trial in another process replaces that.
        self.input_processor.structured_outputs_config = None
        self.grammars = GrammarTrials(cloudpickle.dumps(vllm_config))

    def shutdown(self, *args: Any, **kwargs: Any) -> None:
        """Close the grammar trials, then shut down as `AsyncLLM` does."""
        if (grammars := getattr(self, "grammars", None)) is not None:
            grammars.close()
        super().shutdown(*args, **kwargs)

    async def learn_techniques(self) -> None:
        """Withdraw the techniques that the started engine does not support."""
        planning = self.planning
        if not self._apart and (planning is None or planning.reusing is None):
            return
        try:
            why = await unsupported(self)
        except Exception as error:
            first = str(error).strip().partition("\n")[0]
            why = dict.fromkeys((REUSE, SPARSE, BOUNDED), f"the engine does not tell: {first}")
        scheduler = self.vllm_config.scheduler_config.get_scheduler_cls()
        if not getattr(scheduler, "keeps_answers_private", False):
            name = f"the engine runs with scheduler_cls {scheduler.__module__}.{scheduler.__name__}"
            why |= {SPARSE: name, BOUNDED: name}
        for name in [name for name in self._apart if name in why]:
            del self._apart[name]
        if planning is not None and REUSE in why:
            self.planning = replace(planning, reusing=None)
        for name, reason in why.items():
            logger.info("requests are served as if they had not asked for %s: %s", name, reason)

    async def generate(  # type: ignore[override]
        self, prompt: Any, sampling_params: SamplingParams, request_id: str, **kwargs: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        """Run `AsyncLLM.generate` with the tenant's salt and without `RESERVED` arguments.

        Raises:
            Rendered: the request is for the rendered prompt and not for an answer.
        """
        async with (
            self.turns.turn(),
            aclosing(self._planned(prompt, sampling_params, request_id, kwargs)) as outputs,
        ):
            try:
                async for output in outputs:
                    yield output
            except VLLMValidationError as error:
                if (usage := USAGE.get()) is not None:
                    usage.refusal = str(error.args[0]), error.parameter
                raise

    async def _planned(
        self, prompt: Any, sampling_params: SamplingParams, request_id: str, kwargs: dict[str, Any]
    ) -> AsyncGenerator[RequestOutput, None]:
        sampling_params = without_reserved(sampling_params)
        has_adapters = self.vllm_config.lora_config is not None
        prompt = with_tenant(prompt, TENANT.get(), has_adapters)
        salt = prompt.get("cache_salt") if isinstance(prompt, dict) else None
        apart = self._apart_of(sampling_params)
        prompt = with_technique(prompt, sampling_params, self.lossy)
        sampling_params = with_share(sampling_params, apart)
        self._refuse(prompt, sampling_params)
        if RENDER_ONLY.get():
            raise Rendered(self._prompt(prompt, sampling_params, kwargs))
        share = self._reuse_share(prompt, sampling_params, kwargs) if apart is None else None
        if sampling_params.structured_outputs is not None:
            sampling_params = await self._with_grammar(sampling_params)
        if self.speculates:
            planning = self.planning
            policy = (planning.tenants if planning else ALL_ALIKE).of(tenant_of(salt or ""))
            itl_s = planning.itl_target_s if planning else None
            sampling_params = with_drafting_facts(sampling_params, salt, policy, itl_s)

        reusing = None if self.planning is None else self.planning.reusing
        reuse = None
        if reusing is not None and share is not None:
            reuse = await reusing.plan(
                prompt.get("cache_salt") or "", prompt["prompt_token_ids"], share
            )
        if reuse is not None:
            sampling_params = with_transfer_params(sampling_params, {REUSE_KEY: reuse.params})

        cached = CachedTokens(USAGE.get())
        if reuse is not None:
            cached.at_most(len(prompt["prompt_token_ids"]) - reuse.computed)
        if (recorder := RECORDER.get()) is not None and recorder.again:
            cached.at_most(cached_tokens_of(recorder.again))

        def run(plain: Generate, over: bool) -> AsyncGenerator[RequestOutput, None]:
            if self.planning is None or over:
                return plain(prompt, sampling_params, request_id, **kwargs)
            work = self._work(
                self.planning, plain, prompt, sampling_params, request_id, kwargs, cached
            )
            work = replace(work, private_answer=apart is not None or reuse is not None)
            if reuse is not None:
                work = reusing_work(work, reuse)
            return self.planning.orchestrator.run(work)

        async with aclosing(self.recorded(prompt, sampling_params, run, cached.correct)) as outputs:
            async for output in outputs:
                if output.finished and reusing is not None:
                    await self._finished(reusing, reuse, prompt, kwargs)
                if output.finished and grammar_failed(output, sampling_params):
                    raise VLLMValidationError(
                        "The grammar cannot be compiled or followed.",
                        parameter="structured_outputs",
                    )
                yield output

    def _reuse_share(
        self, prompt: Any, params: SamplingParams, kwargs: dict[str, Any]
    ) -> float | None:
        """Return the share of reused KV to compute again; None if a request reuses nothing.

        Raises:
            VLLMValidationError: a field for techniques is invalid.
        """
        reusing = None if self.planning is None else self.planning.reusing
        mode, budget = ("off", 1.0) if reusing is None else (reusing.mode, reusing.budget)
        try:
            share = reuse_share(params.extra_args, mode, budget)
        except TechniqueError as error:
            raise VLLMValidationError(str(error), parameter=error.param) from None
        token_ids = prompt.get("prompt_token_ids") if isinstance(prompt, dict) else None
        # A request that cannot be prefilled elsewhere cannot use KV from elsewhere either.
        return None if why_local(prompt, token_ids, params, kwargs) else share

    def _apart_of(self, params: SamplingParams) -> Apart | None:
        """Return a request's sparse attention or bounded context (`techniques.apart_of`).

        Raises:
            VLLMValidationError: a field for techniques is invalid.
        """
        try:
            return apart_of(params.extra_args, self._apart)
        except TechniqueError as error:
            raise VLLMValidationError(str(error), parameter=error.param) from None

    async def _finished(
        self, reusing: Reusing, reuse: Reuse | None, prompt: Any, kwargs: dict[str, Any]
    ) -> None:
        """Report a finished prompt for later reuse if its blocks go to the store."""
        if not isinstance(prompt, dict) or kwargs.get("lora_request") is not None:
            return
        token_ids, salt = prompt.get("prompt_token_ids"), prompt.get("cache_salt") or ""
        plain = prompt.get("type", "token") == "token" and not prompt.get("multi_modal_data")
        if token_ids and plain and not is_marked(salt):
            await reusing.finished(salt, token_ids, reuse)

    @property
    def offered(self) -> str:
        """The techniques that a replica with this engine reports (`techniques.offered`)."""
        reusing = None if self.planning is None else self.planning.reusing
        mode = "off" if reusing is None else reusing.mode
        apart = {name: mode for name, (mode, _) in self._apart.items()}
        return offered(self.lossy, {REUSE: mode, **apart})

    def reuse_counts(self) -> dict[str, int] | None:
        """Return the numbers of requests that reused KV and of tokens; None without reuse."""
        reusing = None if self.planning is None else self.planning.reusing
        if reusing is None:
            return None
        return {"requests": reusing.requests, "tokens": reusing.reused_tokens}

    @property
    def speculates(self) -> bool:
        """Whether this engine drafts with Headrace's proposer class."""
        config = self.vllm_config.speculative_config
        return config is not None and config.method == "custom_class"

    async def speculation(self, command: dict[str, Any]) -> dict[str, Any] | None:
        """Run a drafting command (`HeadraceProposer.command`) and return the state of drafting.

        Return None if the engine does not draft.
        """
        if not self.speculates:
            return None
        return await self._tell_worker("headrace_speculation", command)

    async def memory(self, command: dict[str, Any]) -> dict[str, Any] | None:
        """Return the drafting memory's answer to `Corpora.command`; None without a memory."""
        return await self._tell_worker("headrace_memory", command) if self.speculates else None

    def tokenized(self, texts: list[str]) -> list[list[int]]:
        """Return the token ids of independent texts, without special tokens. Blocks."""
        if self._own_tokenizer is None:
            # Two threads must not use the tokenizer that renders requests at the same time.
            self._own_tokenizer = copy.deepcopy(self.get_tokenizer())
        ids: list[list[int]] = self._own_tokenizer(texts, add_special_tokens=False).input_ids
        return ids

    async def notify_kv_transfer_request_rejected(
        self, request_id: str, kv_transfer_params: dict[str, Any], **kwargs: Any
    ) -> None:
        """Do nothing: vLLM's serving layer calls this with parameters that a client sent."""

    async def _add_request(
        self, request: Any, prompt: str | None, parent_req: Any, index: int, queue: Any
    ) -> None:
        await super()._add_request(request, prompt, parent_req, index, queue)
        if parent_req is not None and (usage := USAGE.get()) is not None:
            state = self.output_processor.request_states.get(request.request_id)
            if state is not None:
                usage.samples.setdefault(request.external_req_id, []).append(state)

    async def _tell_worker(self, method: str, command: dict[str, Any]) -> dict[str, Any] | None:
        """Call a method of all workers; return the answer of the worker that drafts."""
        answers = await self.collective_rpc(method, args=(command,))
        return next((dict(answer) for answer in answers if answer), None)

    def _refuse(self, prompt: Any, params: SamplingParams) -> None:
        token_ids = prompt.get("prompt_token_ids") if isinstance(prompt, dict) else None
        if token_ids and prompt.get("multi_modal_data"):
            token_ids = None  # placeholders may lie above the vocabulary
        wrong = why_refused(
            token_ids,
            params,
            self.model_config.get_vocab_size(),
            all_rows=not self.vllm_config.cache_config.kv_sharing_fast_prefill,
        )
        if wrong is not None:
            raise VLLMValidationError(wrong[0], parameter=wrong[1])

    async def _with_grammar(self, params: SamplingParams) -> SamplingParams:
        """Return the parameters with the grammar that its trial returned.

        Raises:
            VLLMValidationError: the grammar is refused.
            GracefulHTTPError: 503, the trial could not run now.
        """
        try:
            found = await self.grammars.passed(grammar_of(params), TENANT.get() or "")
        except GrammarRefused as error:
            raise VLLMValidationError(
                f"The grammar is refused: {error}.", parameter="structured_outputs"
            ) from None
        except TrialUnfinished as error:
            raise GracefulHTTPError(
                f"The grammar could not be checked now, ask again: {error}.",
                HTTPStatus.SERVICE_UNAVAILABLE,
            ) from None
        return with_grammar(params, found)

    def _prompt(self, prompt: Any, params: SamplingParams, kwargs: dict[str, Any]) -> Prompt:
        token_ids = prompt.get("prompt_token_ids") if isinstance(prompt, dict) else None
        if not token_ids:
            return Prompt((), "")
        plain = prompt.get("type", "token") == "token" and kwargs.get("lora_request") is None
        return Prompt(
            token_ids=token_ids,
            salt=prompt.get("cache_salt") or "",
            local_only=self._why_local(prompt, token_ids, params, kwargs),
            plain=plain,
        )

    def _why_local(
        self, prompt: Any, token_ids: Any, params: SamplingParams, kwargs: dict[str, Any]
    ) -> str | None:
        cache: Any = self.vllm_config.cache_config
        tokens = cache.num_gpu_blocks * cache.block_size if cache.num_gpu_blocks else math.inf
        return why_local(prompt, token_ids, params, kwargs, tokens, self._stream)

    def _work(
        self,
        planning: Planning,
        plain: Generate,
        prompt: Any,
        params: SamplingParams,
        request_id: str,
        kwargs: dict[str, Any],
        cached: CachedTokens,
    ) -> Work[RequestOutput]:
        token_ids = prompt.get("prompt_token_ids") if isinstance(prompt, dict) else None
        salt = prompt.get("cache_salt") if isinstance(prompt, dict) else None
        transfer = (params.extra_args or {}).get(PARAMS_KEY) or {}
        job = prompts.job if (prompts := PROMPTS.get()) else None
        recorder = RECORDER.get()
        said = tokens_of(recorder.again, 0) if recorder is not None and params.n == 1 else []

        def submit(
            engine_request_id: str, kv_params: dict[str, Any] | None
        ) -> AsyncGenerator[RequestOutput, None]:
            chosen = params if kv_params is None else with_transfer_params(params, kv_params)
            return plain(prompt, chosen, engine_request_id, **kwargs)

        async def prefill(plan: Plan) -> PrefillResult:
            attributes: dict[str, Any] = {
                "request_id": request_id,
                "prompt_tokens": len(token_ids or ()),
            }
            with span("remote prefill", kwargs.get("trace_headers"), **attributes) as trace_headers:
                result = await planning.prefill_call(
                    PrefillRequest(
                        request_id=request_id,
                        token_ids=np.asarray(token_ids, dtype="<i4").tobytes(),
                        compute_tokens=plan.compute_tokens,
                        replica=plan.replica,
                        salt=salt,
                        priority=kwargs.get("priority", 0),
                        trace_headers=trace_headers,
                        plan_id=plan.plan_id,
                        check=plan.replica in planning.orchestrator.distrust,
                        reuse=transfer.get(REUSE_KEY),
                    )
                )
                cached.at_most(result.cached_tokens)
                return result

        async def release(kv_params: dict[str, Any]) -> None:
            await AsyncLLM.notify_kv_transfer_request_rejected(
                self, f"{request_id}-unused", kv_params
            )

        return Work(
            request_id=request_id,
            token_ids=token_ids or (),
            salt=salt or "",
            local_only=self._why_local(prompt, token_ids, params, kwargs),
            trace_headers=kwargs.get("trace_headers"),
            plan=PLAN.get(),
            said=said,
            submit=submit,
            prefill=prefill,
            release=release,
            cached_tokens=lambda output: output.num_cached_tokens or 0,
            new_tokens=lambda output: output.outputs[0].token_ids if output.outputs else (),
            turn=lambda tokens: planning.gate.turn(tokens, job),
            engine_steps=lambda: planning.meter.steps_total,
            engine_busy=lambda: planning.meter.running > 0,
        )


class PlannedVLLMEngine(MeteredVLLMEngine):
    """Ray's vLLM engine around a `PlannedLLM`.

    Args:
        planning: (vLLM config of the started engine, its meter) -> its planning; None for an
            engine that runs each request immediately.
    """

    llm: PlannedLLM

    async def start(self) -> None:
        """Start the engine, and learn which techniques it supports."""
        await super().start()
        await self.llm.learn_techniques()

    def __init__(
        self,
        llm_config: Any,
        *,
        planning: Callable[[VllmConfig, EngineMeter], Planning] | None = None,
    ) -> None:
        super().__init__(llm_config)
        self.make_llm = PlannedLLM
        if planning is not None:
            self.make_llm = partial(
                PlannedLLM, planning=lambda config: planning(config, self.meter)
            )


def vllm_version() -> str:
    """Return the version of the installed vLLM, without a build's suffix."""
    return str(vllm.__version__).partition("+")[0]
