"""First measurements, before a replica serves: a few prompts, prefilled here and there.

Without them the first plans would rest on priors, and the first clients would pay for NIXL's
handshake and for the serving layer's lazy imports. A few seconds on a laptop.
"""

from __future__ import annotations

import logging
import time
import uuid
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Protocol

import httpx

if TYPE_CHECKING:
    from headrace_decode._vllm_compat import PlannedLLM

logger = logging.getLogger("headrace.decode")

PROMPT_TOKENS = (16, 96, 384)
"""Lengths that spread the step-time model's features; cut to what the model and engine take."""
DECODE_TOKENS = 4


class Forcible(Protocol):
    """A planner whose choice can be forced for a while."""

    policy: str


async def calibrate(llm: PlannedLLM, planner: Forcible) -> None:
    """Run each length locally and remotely; a prefill side that fails stays unmeasured."""
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    limit = llm.model_config.max_model_len - DECODE_TOKENS - 1
    vocabulary = llm.model_config.get_vocab_size()
    params = SamplingParams(max_tokens=DECODE_TOKENS, temperature=0.0, ignore_eos=True)
    policy, started = planner.policy, time.perf_counter()
    salt = f"calibrate-{uuid.uuid4().hex}"  # of this start's own: a store may remember the last one
    try:
        for way in ("local", "remote"):
            planner.policy = way
            for length in sorted({min(n, limit) for n in PROMPT_TOKENS}):
                ids = [(7919 * (i + length)) % vocabulary for i in range(length)]
                prompt = TokensPrompt(prompt_token_ids=ids, cache_salt=f"{salt}-{way}")
                name = f"calibrate-{way}-{length}"
                async with aclosing(llm.generate(prompt, params, name)) as outputs:
                    async for _ in outputs:
                        pass
    finally:
        planner.policy = policy
    logger.info("calibrated in %.1f s", time.perf_counter() - started)


async def warm_up(app: Any, model_id: str) -> None:
    """Answer one chat and one completion, so that no client pays for first-time imports."""
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
