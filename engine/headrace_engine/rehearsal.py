"""First step times, before an engine serves: prompts of several lengths, computed three times.

Without them the first plans would rest on a prior that knows neither machine nor model. The first
time teaches nothing: a new engine makes kernels, imports modules and touches memory for the first
time then, and its first step of 16 tokens took three times as long as the next one. A size that
was measured once, and wrongly, looks dear and is then not chosen again for a minute.
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

from headrace_engine.meter import EngineMeter

PROMPT_TOKENS = (16, 96, 384)
"""Lengths that spread the step-time model's features; cut to what the model and engine take."""
ANSWER_TOKENS = 4
TIMES = 3

Generate = Callable[[list[int], int, str], AsyncGenerator[Any, None]]
"""(prompt, tokens to answer, request id) -> the engine's outputs."""


def rehearsal_prompts(max_model_len: int, vocabulary: int) -> list[list[int]]:
    """Prompts of each length, as token ids."""
    limit = max_model_len - ANSWER_TOKENS - 1
    lengths = sorted({min(length, limit) for length in PROMPT_TOKENS})
    return [[(7919 * (i + length)) % vocabulary for i in range(length)] for length in lengths]


async def rehearse(generate: Generate, meter: EngineMeter, prompts: list[list[int]]) -> None:
    """Compute each prompt `TIMES` times; `meter` learns from all but the first time."""
    start = uuid.uuid4().hex  # of this start's own: a store may remember the last one
    for number in range(TIMES):
        meter.learns = number > 0
        for ids in prompts:
            name = f"rehearsal-{start}-{number}-{len(ids)}"
            async with aclosing(generate(ids, ANSWER_TOKENS, name)) as outputs:
                async for _ in outputs:
                    pass
