"""The decode engine's frontend: an `AsyncLLM` whose `generate` goes through the prefill executor.

Every request passes through `generate`, below vLLM's OpenAI layer, with its prompt as token ids.
Chat, completions, tools and structured output are therefore planned in the same way, and vLLM
itself answers them.
"""

from __future__ import annotations

import copy
import hashlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from http import HTTPStatus
from typing import Any

import cloudpickle
from vllm import RequestOutput, SamplingParams
from vllm.config import VllmConfig
from vllm.exceptions import GracefulHTTPError, VLLMValidationError
from vllm.v1.engine.async_llm import AsyncLLM

from headrace_decode.apis.prompt_usage import USAGE, CachedTokens
from headrace_decode.apis.retention import RETENTION
from headrace_decode.attention.settings import settings_of as sparse_settings_of
from headrace_decode.compression.engine.settings import settings_of as compression_settings_of
from headrace_decode.grammars.trials import GrammarRefused, GrammarTrials, TrialUnfinished
from headrace_decode.http.internal_port import REQUEST_ID, TENANT
from headrace_decode.llm.engine_classes import choose_engine_classes
from headrace_decode.llm.engine_request import EngineRequest, why_local
from headrace_decode.llm.input_validation import why_invalid
from headrace_decode.llm.plan_execution import PlanExecution
from headrace_decode.llm.request_params import (
    grammar_failed,
    grammar_of,
    lossy_store_of,
    with_drafting_facts,
    with_grammar,
    with_keep_ratio,
    with_technique,
    with_tenant,
    with_transfer_params,
    without_reserved,
)
from headrace_decode.planning.blending_planner import BlendingPlan, BlendingPlanner, blending_work
from headrace_decode.planning.fanout_limiter import FanoutLimiter
from headrace_decode.rendering.keys import RENDER_ONLY, PromptRendered, RenderedPrompt
from headrace_decode.rendering.long_text_renderer import register
from headrace_decode.resume.emitted import adapter_of, cached_tokens_of
from headrace_decode.resume.recorder import RECORDER
from headrace_decode.resume.resumable_llm import Generate, ResumableLLM
from headrace_decode.speculative.tenant_policies import ALL_ALIKE, Tenants
from headrace_decode.techniques import (
    BLENDING,
    COMPRESSION,
    PARTIAL_KV,
    SPARSE,
    LossyMode,
    TechniqueError,
    lossy_mode_of,
    offered_techniques,
    recompute_ratio,
)
from headrace_engine.adapters.middleware import refusal
from headrace_engine.adapters.registry import AdapterRegistry
from headrace_engine.adapters.sources import AdapterError
from headrace_engine.extensions.scheduler import why_no_extensions
from headrace_engine.kv_groups import BlockUse
from headrace_engine.kv_transfer.handoff import BLENDING_KEY
from headrace_engine.serving.techniques import unsupported
from headrace_engine.step_time import StepTime
from headrace_engine.usage.usage_book import UsageBook, UsageRecord
from headrace_engine.vllm.llm import (
    SendRequest,
    cache_tokens,
    lora_request,
    process_media_by_tenant,
    request_state,
    skip_grammar_parsing,
    with_retention,
)
from headrace_kvstore.identity.salts import is_isolated, tenant_of

logger = logging.getLogger("headrace.decode")


@dataclass(frozen=True)
class Planning(PlanExecution):
    """The parts with which a decode engine plans its requests and carries out the plans."""

    tenants: Tenants = ALL_ALIKE
    blending: BlendingPlanner | None = None
    """Planner of stored KV to blend at other positions; None without KV blending."""
    itl_target_s: float | None = None
    """Target step time, which drafts must not exceed; None without a target."""


class PlannedLLM(ResumableLLM):
    """A frontend that plans each request before the engine runs it.

    Args:
        planning: makes the engine's planning from the configuration of the started engine; None
            for an engine that runs each request immediately.
    """

    adapters: AdapterRegistry | None = None
    """The adapters of this replica; None if it has none."""
    usage_book: UsageBook | None = None
    """Records what clients' requests cost; None for an engine that does not count it."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        *args: Any,
        planning: Callable[[VllmConfig], Planning] | None = None,
        **kwargs: Any,
    ) -> None:
        register()
        why_not = choose_engine_classes(vllm_config)
        super().__init__(vllm_config, *args, why_not_resumable=why_not, **kwargs)
        self.planning = None if planning is None else planning(vllm_config)
        step_time = StepTime() if self.planning is None else self.planning.meter.step_time
        self.fanout = FanoutLimiter(step_time)
        self.lossy_store = lossy_store_of(vllm_config)
        sparse = sparse_settings_of(vllm_config.additional_config)
        compression = compression_settings_of(vllm_config.additional_config)
        self._lossy_modes = {
            name: (settings.mode, settings.keep_ratio)
            for name, settings in ((SPARSE, sparse), (COMPRESSION, compression))
            if settings is not None
        }
        self._compresses_prompts = compression is not None and compression.stream
        self._corpus_tokenizer: Any = None
        if vllm_config.model_config.supports_multimodal_inputs:
            process_media_by_tenant(self, _tenant_digest)
        skip_grammar_parsing(self)  # the trial in another process replaces it
        self.grammars = GrammarTrials(cloudpickle.dumps(vllm_config))

    def shutdown(self, *args: Any, **kwargs: Any) -> None:
        """Close the grammar trials, then shut down as `AsyncLLM` does."""
        if (grammars := getattr(self, "grammars", None)) is not None:
            grammars.close()
        super().shutdown(*args, **kwargs)

    @property
    def blending(self) -> BlendingPlanner | None:
        """The planner of KV blending; None if this engine does not blend."""
        return None if self.planning is None else self.planning.blending

    async def withdraw_unsupported_techniques(self) -> dict[str, str]:
        """Withdraw the techniques that the started engine does not support; return the reasons."""
        if not self._lossy_modes and self.blending is None:
            return {}
        try:
            why = await unsupported(self)
        except Exception as error:
            first = str(error).strip().partition("\n")[0]
            reason = f"the engine does not answer: {first}"
            why = dict.fromkeys((BLENDING, *PARTIAL_KV), reason)
        if (other_class := why_no_extensions(self.vllm_config)) is not None:
            why |= dict.fromkeys(PARTIAL_KV, other_class)  # answers would be shared
        withdrawn = [name for name in self._lossy_modes if name in why]
        for name in withdrawn:
            del self._lossy_modes[name]
        if self.planning is not None and self.blending is not None and BLENDING in why:
            self.planning = replace(self.planning, blending=None)
            withdrawn.append(BLENDING)
        for name in withdrawn:
            logger.info("requests are served as if they had not asked for %s: %s", name, why[name])
        return {name: why[name] for name in withdrawn}

    async def generate(  # type: ignore[override]
        self, prompt: Any, sampling_params: SamplingParams, request_id: str, **kwargs: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        """Run `AsyncLLM.generate` with the tenant's salt and without `RESERVED` arguments.

        Raises:
            PromptRendered: the request is for the rendered prompt and not for an answer.
        """
        options = with_retention(kwargs, RETENTION.get(), request_id)
        request = EngineRequest(prompt, sampling_params, request_id, options)
        async with self.fanout.admit():
            try:
                request = self._with_earlier_adapter(request)
                async with (
                    self._with_adapter(request),
                    aclosing(self._planned(request)) as outputs,
                ):
                    async for output in outputs:
                        yield output
            except VLLMValidationError as error:
                if (usage := USAGE.get()) is not None:
                    usage.refusal = str(error.args[0]), error.parameter
                raise

    def _with_earlier_adapter(self, request: EngineRequest) -> EngineRequest:
        """Return a request that resumes a stream, with the content of its LoRA adapter with which
        the stream began; return any other request unchanged.

        Raises:
            VLLMValidationError: this replica does not have that content.
        """
        if (recorder := RECORDER.get()) is None:
            return request
        recorder.adapter = request.adapter_digest
        earlier = adapter_of(recorder.earlier)
        if not recorder.earlier or earlier == request.adapter_digest:
            return request
        version = None
        if self.adapters is not None and request.adapter is not None:
            version = self.adapters.version(request.adapter.lora_name, earlier)
        if version is None:
            raise VLLMValidationError(
                "The stream cannot be resumed: its LoRA adapter was replaced.", parameter="model"
            )
        recorder.adapter = earlier
        options = {**request.options, "lora_request": lora_request(version)}
        return replace(request, options=options)

    @asynccontextmanager
    async def _with_adapter(self, request: EngineRequest) -> AsyncIterator[None]:
        """Hold a request's adapter in use, loaded into the engine; not for a request that is only
        rendered.

        Raises:
            VLLMValidationError: the engine refuses the adapter.
        """
        if self.adapters is None or request.adapter is None or RENDER_ONLY.get():
            yield
            return
        async with AsyncExitStack() as stack:
            try:
                await stack.enter_async_context(self.adapters.using(request.adapter.lora_int_id))
            except AdapterError as error:
                _, document = refusal(request.adapter.lora_name, error)
                raise VLLMValidationError(document["message"], parameter="model") from None
            yield

    async def _planned(self, request: EngineRequest) -> AsyncGenerator[RequestOutput, None]:
        request, lossy_mode = self._with_salt_and_techniques(request)
        self._refuse_invalid(request)
        if RENDER_ONLY.get():
            raise PromptRendered(self._rendered(request))
        ratio = self._recompute_ratio(request) if lossy_mode is None else None
        params = request.params
        if params.structured_outputs is not None:
            params = await self._with_tried_grammar(params)
        if self.speculates:
            tenants = self.planning.tenants if self.planning else ALL_ALIKE
            policy = tenants.of(tenant_of(request.salt))
            itl_s = self.planning.itl_target_s if self.planning else None
            params = with_drafting_facts(params, request.salt, policy, itl_s)

        blending, plan, token_ids = self.blending, None, request.token_ids or []
        if blending is not None and ratio is not None:
            plan = await blending.plan(request.salt, token_ids, ratio)
        cached = CachedTokens(USAGE.get())
        if plan is not None:
            params = with_transfer_params(params, {BLENDING_KEY: plan.params})
            cached.limit(len(token_ids) - plan.computed)
        if (recorder := RECORDER.get()) is not None and recorder.earlier:
            cached.limit(cached_tokens_of(recorder.earlier))
        request = replace(request, params=params)
        is_private = lossy_mode is not None or plan is not None

        def run(generate: Generate, is_finished: bool) -> AsyncGenerator[RequestOutput, None]:
            if self.planning is None or is_finished:
                return generate(
                    request.prompt, request.params, request.request_id, **request.options
                )
            local_only = self._why_local(request)
            work = self.planning.work(request, generate, self._release_kv_of, cached, local_only)
            work = replace(work, private_answer=is_private)
            return self.planning.executor.run(work if plan is None else blending_work(work, plan))

        outputs = self.recorded(request.prompt, params, run, cached.correct)
        async with aclosing(outputs):
            async for output in outputs:
                if output.finished and blending is not None:
                    await self._record_for_blending(blending, plan, request)
                if output.finished and grammar_failed(output, params):
                    raise VLLMValidationError(
                        "The grammar cannot be compiled or followed.",
                        parameter="structured_outputs",
                    )
                yield output

    def _with_salt_and_techniques(
        self, request: EngineRequest
    ) -> tuple[EngineRequest, LossyMode | None]:
        """Return the request with its tenant's salt, and its sparse attention or compression.

        Raises:
            VLLMValidationError: a field for techniques is invalid.
        """
        params = without_reserved(request.params)
        prompt = with_tenant(request.prompt, TENANT.get())
        try:
            lossy_mode = lossy_mode_of(params.extra_args, self._lossy_modes)
        except TechniqueError as error:
            raise VLLMValidationError(str(error), parameter=error.param) from None
        prompt = with_technique(prompt, params, self.lossy_store)
        params = with_keep_ratio(params, lossy_mode)
        return replace(request, prompt=prompt, params=params), lossy_mode

    def _recompute_ratio(self, request: EngineRequest) -> float | None:
        """Return the keep ratio of blended KV to recompute; None if a request blends nothing.

        Raises:
            VLLMValidationError: a field for techniques is invalid.
        """
        blending = self.blending
        mode, default = ("off", 1.0) if blending is None else (blending.mode, blending.budget)
        try:
            ratio = recompute_ratio(request.params.extra_args, mode, default)
        except TechniqueError as error:
            raise VLLMValidationError(str(error), parameter=error.param) from None
        # A request that cannot be prefilled elsewhere cannot use KV from elsewhere either. Other
        # media have the same tokens, so stored KV cannot be found by them.
        return None if request.has_media or why_local(request) else ratio

    async def _record_for_blending(
        self, blending: BlendingPlanner, plan: BlendingPlan | None, request: EngineRequest
    ) -> None:
        """Record a finished prompt for later blending if its blocks go to the store."""
        if request.is_plain and request.token_ids and not is_isolated(request.salt):
            await blending.on_finished(request.salt, request.token_ids, plan)

    @property
    def offered_techniques(self) -> str:
        """The techniques that a replica with this engine reports to gateways."""
        modes = {name: mode for name, (mode, _) in self._lossy_modes.items()}
        mode = "off" if self.blending is None else self.blending.mode
        return offered_techniques(self.lossy_store, {BLENDING: mode, **modes})

    def blending_counts(self) -> dict[str, int] | None:
        """Return the numbers of requests and tokens that were blended; None without blending."""
        if self.blending is None:
            return None
        return {"requests": self.blending.requests, "tokens": self.blending.blended_tokens}

    @property
    def speculates(self) -> bool:
        """Whether this engine drafts with Headrace's proposer class."""
        config = self.vllm_config.speculative_config
        return config is not None and config.method == "custom_class"

    async def speculation(self, command: dict[str, Any]) -> dict[str, Any] | None:
        """Run a command of the engine's drafter, and return the state of speculative decoding.

        Return None if the engine does not draft.
        """
        if not self.speculates:
            return None
        return await self._call_workers("speculation", command)

    async def corpus(self, command: dict[str, Any]) -> dict[str, Any] | None:
        """Return the retrieval memory's answer to a corpus command; None without a memory."""
        return await self._call_workers("corpus", command) if self.speculates else None

    def tokenize(self, texts: list[str]) -> list[list[int]]:
        """Return the token ids of independent texts, without special tokens. Blocks."""
        if self._corpus_tokenizer is None:
            # Two threads must not use the tokenizer that renders requests at the same time.
            self._corpus_tokenizer = copy.deepcopy(self.get_tokenizer())
        ids: list[list[int]] = self._corpus_tokenizer(texts, add_special_tokens=False).input_ids
        return ids

    async def notify_kv_transfer_request_rejected(
        self, request_id: str, kv_transfer_params: dict[str, Any], **kwargs: Any
    ) -> None:
        """Do nothing: vLLM's serving layer calls this with parameters that a client sent."""

    async def _release_kv_of(self, request_id: str, kv_params: dict[str, Any]) -> None:
        await AsyncLLM.notify_kv_transfer_request_rejected(self, request_id, kv_params)

    async def _send_to_engine(self, request: Any, send: SendRequest) -> None:
        """Send one choice of a request to the engine. Keep the state of each choice for the usage
        if there are several."""
        record = None if request.abort_immediately else self._usage_record()
        if record is not None and self.usage_book is not None:
            self.usage_book.follow(request.request_id, record)
        await super()._send_to_engine(request, send)
        usage, state = USAGE.get(), request_state(self, request.request_id)
        if usage is not None and state is not None and state.parent_req is not None:
            usage.samples.setdefault(request.external_req_id, []).append(state)

    def _usage_record(self) -> UsageRecord | None:
        """Return the record of the client's request that this task answers; None without one."""
        request_id = REQUEST_ID.get()
        if self.usage_book is None or request_id is None:
            return None
        return self.usage_book.record_of(TENANT.get() or "", request_id)

    async def _call_workers(self, name: str, command: dict[str, Any]) -> dict[str, Any] | None:
        """Run an extension's command in all workers; return the answer of the one that drafts."""
        answers = await self.collective_rpc("headrace_command", args=(name, command))
        return next((dict(answer) for answer in answers if answer), None)

    def _refuse_invalid(self, request: EngineRequest) -> None:
        wrong = why_invalid(
            None if request.has_media else request.token_ids,  # placeholders may lie above it
            request.params,
            self.model_config.get_vocab_size(),
            all_rows=not self.vllm_config.cache_config.kv_sharing_fast_prefill,
        )
        if wrong is not None:
            raise VLLMValidationError(wrong[0], parameter=wrong[1])

    async def _with_tried_grammar(self, params: SamplingParams) -> SamplingParams:
        """Return the parameters with the grammar that its trial returned.

        Raises:
            VLLMValidationError: the grammar is refused.
            GracefulHTTPError: 503, the trial could not run now.
        """
        try:
            tried = await self.grammars.passed(grammar_of(params), TENANT.get() or "")
        except GrammarRefused as error:
            raise VLLMValidationError(
                f"The grammar is refused: {error}.", parameter="structured_outputs"
            ) from None
        except TrialUnfinished as error:
            raise GracefulHTTPError(
                f"The grammar could not be checked now, ask again: {error}.",
                HTTPStatus.SERVICE_UNAVAILABLE,
            ) from None
        return with_grammar(params, tried)

    def _rendered(self, request: EngineRequest) -> RenderedPrompt:
        if not request.token_ids:
            return RenderedPrompt((), "")
        lora = request.adapter
        return RenderedPrompt(
            token_ids=request.token_ids,
            salt=request.salt,
            local_only=self._why_local(request),
            plain=request.is_text,
            lora=None if lora is None else (lora.lora_name, lora.lora_path),
            adapter=request.adapter_digest,
        )

    def _why_local(self, request: EngineRequest) -> str | None:
        use = BlockUse() if self.planning is None else self.planning.meter.block_use
        tokens, compresses = cache_tokens(self.vllm_config, use), self._compresses_prompts
        why = why_local(request, tokens, compresses, self._identifies_media)
        if why is None and self.adapters is not None and request.adapter is not None:
            why = self.adapters.why_local(request.adapter_digest)
        return why


def _tenant_digest() -> str | None:
    tenant = TENANT.get()
    if tenant is None:
        return None
    return hashlib.blake2b(tenant.encode(), digest_size=16).hexdigest()
