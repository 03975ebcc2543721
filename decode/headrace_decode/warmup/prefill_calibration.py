"""Measures the remote prefill of a few prompts before a replica serves.

Without these measurements the first plans would rest on priors, and the first clients would wait
for NIXL's handshake and for the serving layer's lazy imports. The engine has measured its step
times before (`headrace_engine.rehearsal`).
"""

from __future__ import annotations

import logging
import time
import uuid
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Protocol

import httpx
from vllm import SamplingParams
from vllm.inputs import TokensPrompt

from headrace_engine.rehearsal import ANSWER_TOKENS, rehearsal_prompts

if TYPE_CHECKING:
    from headrace_decode.llm.planned_llm import PlannedLLM

logger = logging.getLogger("headrace.decode")

PROMPTS = 3
"""Number of prompts to prefill remotely, shortest first. They show the costs of a call and a
transfer."""


class ForciblePlanner(Protocol):
    """A planner whose choice can be forced for a while."""

    policy: str


async def measure_remote_prefill(llm: PlannedLLM, planner: ForciblePlanner) -> None:
    """Prefill the shortest `PROMPTS` rehearsal prompts remotely; failures leave no measurement."""
    config = llm.model_config
    policy, started = planner.policy, time.perf_counter()
    params = SamplingParams(max_tokens=ANSWER_TOKENS, temperature=0.0, ignore_eos=True)
    planner.policy = "remote"
    try:
        for ids in rehearsal_prompts(config.max_model_len, config.get_vocab_size())[:PROMPTS]:
            name = f"calibrate-{uuid.uuid4().hex}"
            prompt = TokensPrompt(prompt_token_ids=ids, cache_salt=name)
            async with aclosing(llm.generate(prompt, params, name)) as outputs:
                async for _ in outputs:
                    pass
    finally:
        planner.policy = policy
    logger.info("calibrated in %.1f s", time.perf_counter() - started)


async def answer_warmup_requests(app: Any, model_id: str) -> None:
    """Answer one chat and one completion, so that no client waits for first-time imports."""
    transport = httpx.ASGITransport(app=app)
    common = {"model": model_id, "max_tokens": 2, "stream": True, "cache_salt": "calibrate"}
    async with httpx.AsyncClient(transport=transport, base_url="http://replica") as client:
        for path, prompt in (
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello"}]}),
            ("/v1/completions", {"prompt": "Hello"}),
        ):
            response = await client.post(path, json={**common, **prompt}, timeout=120)
            if response.is_error:
                logger.warning("warm-up of %s: %s", path, response.text[:200])
