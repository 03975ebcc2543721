"""Carries out plans of a decode engine's requests: their form for the prefill executor."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from headrace_decode.apis.prompt_usage import CachedTokens
from headrace_decode.apis.retention import RETENTION
from headrace_decode.http.internal_port import PLAN, REQUEST_ID, TENANT
from headrace_decode.llm.engine_request import EngineRequest
from headrace_decode.llm.request_params import with_transfer_params
from headrace_decode.planning.fanout_limiter import FANOUT
from headrace_decode.planning.prefill_executor import Plan, PrefillExecutor, Work
from headrace_decode.resume.emitted import tokens_of_choice
from headrace_decode.resume.recorder import RECORDER
from headrace_decode.resume.resumable_llm import Generate
from headrace_engine.adapters.registry import AdapterRegistry
from headrace_engine.kv_transfer.handoff import (
    BLENDING_KEY,
    PARAMS_KEY,
    PrefillAdapterError,
    PrefillRequest,
    PrefillResult,
)
from headrace_engine.kv_transfer.media import encode_media, planning_tokens
from headrace_engine.meter import EngineMeter
from headrace_engine.prefill_admission import PrefillAdmission
from headrace_engine.tracing import span
from headrace_engine.usage.request_usage import usage_of_dict

PrefillCall = Callable[[PrefillRequest], Awaitable[PrefillResult]]
MEDIA_TIMEOUT_S = 15.0
"""Minimum time-out of a remote prefill whose prompt has media. Plans do not predict how long their
tensors are on their way, nor how long the encoder computes."""

ReleaseCall = Callable[[str, dict[str, Any]], Awaitable[None]]


@dataclass(frozen=True)
class PlanExecution:
    """The parts with which a decode engine carries out the plans of its requests."""

    executor: PrefillExecutor
    prefill_call: PrefillCall
    """Call that prefills a prompt at another engine."""
    meter: EngineMeter
    admission: PrefillAdmission
    adapters: Callable[[], AdapterRegistry | None] = lambda: None
    """Returns the adapters of this replica; None if it has none."""

    def work(
        self,
        request: EngineRequest,
        generate: Generate,
        release_kv: ReleaseCall,
        cached: CachedTokens,
        local_only: str | None,
    ) -> Work[Any]:
        """Return a request in the prefill executor's form.

        Args:
            generate: starts the request on this replica's engine.
            release_kv: (id, parameters to pull KV) -> tells the prefill engine that the KV will not
                be pulled.
            cached: receives the number of tokens that the prefill engine did not compute.
            local_only: why the prompt must be prefilled here; None if it may be prefilled
                elsewhere.
        """
        params, token_ids = request.params, request.token_ids or ()
        lora, digest, adapters = request.adapter, request.adapter_digest, self.adapters()
        adapter = None if lora is None or adapters is None else adapters.ref_of(lora.lora_int_id)
        trace_headers = request.options.get("trace_headers")
        job = fanout.job if (fanout := FANOUT.get()) else None
        recorder, client_id, tenant = RECORDER.get(), REQUEST_ID.get(), TENANT.get() or ""
        retain_s = RETENTION.get()
        earlier = recorder.earlier if recorder is not None and params.n == 1 else []
        resumes = recorder is not None and bool(recorder.earlier)

        def submit(
            engine_request_id: str, kv_params: dict[str, Any] | None
        ) -> AsyncGenerator[Any, None]:
            chosen = params if kv_params is None else with_transfer_params(params, kv_params)
            return generate(request.prompt, chosen, engine_request_id, **request.options)

        async def prefill(plan: Plan) -> PrefillResult:
            attributes: dict[str, Any] = {
                "request_id": request.request_id,
                "prompt_tokens": len(token_ids),
            }
            with span("remote prefill", trace_headers, **attributes) as span_headers:
                media = b""
                if request.has_media:
                    media = await asyncio.to_thread(encode_media, request.prompt)
                result = await self._prefill(
                    PrefillRequest(
                        request_id=request.request_id,
                        token_ids=np.asarray(token_ids, dtype="<i4").tobytes(),
                        compute_tokens=plan.compute_tokens,
                        replica=plan.replica,
                        salt=request.salt or None,
                        priority=request.options.get("priority", 0),
                        trace_headers=span_headers,
                        plan_id=plan.plan_id,
                        check=plan.replica in self.executor.verification,
                        blending=((params.extra_args or {}).get(PARAMS_KEY) or {}).get(
                            BLENDING_KEY
                        ),
                        adapter=adapter,
                        media=media,
                        client_id=client_id or "",
                        retain_s=retain_s,
                        resumes=resumes,
                    )
                )
                cached.limit(result.cached_tokens)
                if client_id is not None:
                    record = self.meter.usage.record_of(tenant, client_id)
                    record.elsewhere.add(usage_of_dict(result.usage))
                return result

        async def release(kv_params: dict[str, Any]) -> None:
            await release_kv(f"{request.request_id}-unused", kv_params)

        return Work(
            request_id=request.request_id,
            token_ids=planning_tokens(request.prompt) if request.has_media else token_ids,
            # Plans see prompts of different adapters as prompts of different tenants.
            salt=f"{request.salt}\0{digest}" if digest else request.salt,
            local_only=local_only,
            trace_headers=trace_headers,
            plan=PLAN.get(),
            resumed_tokens=tokens_of_choice(earlier, 0),
            submit=submit,
            prefill=prefill,
            release=release,
            cached_tokens=lambda output: output.num_cached_tokens or 0,
            new_tokens=lambda output: output.outputs[0].token_ids if output.outputs else (),
            min_timeout_s=MEDIA_TIMEOUT_S if request.has_media else 0.0,
            turn=lambda tokens: self.admission.turn(tokens, job, resumes=resumes),
            engine_steps=lambda: self.meter.steps_total,
            engine_busy=lambda: self.meter.running > 0,
        )

    async def _prefill(self, request: PrefillRequest) -> PrefillResult:
        """Prefill a prompt at another engine. If that cannot use the adapter, the adapter's next
        prompts are prefilled at this replica."""
        try:
            return await self.prefill_call(request)
        except PrefillAdapterError:
            adapters = self.adapters()
            if adapters is not None and request.adapter is not None:
                adapters.record_remote_failure(request.adapter.digest)
            raise
