"""First step times, before an engine serves: a text's beginnings, each computed up to three times.

Without them the first plans would rest on a prior that knows neither machine nor model. Of each
step the fastest of the three times is learned. A new engine makes kernels, imports modules and
touches memory for the first time then, and other engines start on the same cores: steps took up to
25 times as long as they do later. An engine that looks so dear is not chosen, so it does not learn
better for a minute.

An engine that is slow once it is warm computes the long beginnings once: on a laptop's two cores
two times more are 8 of 62 s of the start, and the fastest of three was 0 to 8 % less than the first
(four engines, two at a time).

The engine has the beginnings that came before in its cache. So the last 384 tokens stand behind
1,536 others, where the first 384 had none: the difference is what attention costs. Without it a
prompt of 4,100 tokens was predicted to take six times its time.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

from headrace_engine.meter import EngineMeter, Step

PROMPT_TOKENS = (16, 96, 384, 1536, 1920)
"""Lengths that spread the step-time model's features; cut to what the model and engine take."""
ANSWER_TOKENS = 4
TIMES = 3
SHORT_TOKENS, SHORT_S = 384, 0.4
"""If the prompts of so many tokens together take longer than `SHORT_S` the second time, only they
are repeated. The first time tells nothing: a card's kernels are made then, which takes seconds."""

Generate = Callable[[list[int], int, str, str], AsyncGenerator[Any, None]]
"""(prompt, tokens to answer, request id, salt) -> the engine's outputs."""


def rehearsal_prompts(max_model_len: int, vocabulary: int) -> list[list[int]]:
    """Beginnings of each length, as token ids."""
    limit = max_model_len - ANSWER_TOKENS - 1
    lengths = sorted({min(length, limit) for length in PROMPT_TOKENS})
    return [[7919 * i % vocabulary for i in range(length)] for length in lengths]


async def rehearse(
    generate: Generate,
    meter: EngineMeter,
    prompts: list[list[int]],
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Compute each prompt up to `TIMES` times; `meter` learns the fastest of each step."""
    start = uuid.uuid4().hex  # of this start's own: a store may remember the last one
    fastest: dict[tuple[int, int], Step] = {}
    meter.learns = False
    for number in range(TIMES):
        salt, began_s = f"rehearsal-{start}-{number}", clock()
        for ids in prompts:
            if number and len(ids) > SHORT_TOKENS and clock() - began_s > SHORT_S:
                break
            steps: list[Step] = []
            meter.on_step.append(steps.append)
            async with aclosing(
                generate(ids, ANSWER_TOKENS, f"{salt}-{len(ids)}", salt)
            ) as outputs:
                async for _ in outputs:
                    pass
            meter.on_step.pop()
            for at, step in enumerate(steps):
                same = fastest.setdefault((len(ids), at), step)
                if step.seconds < same.seconds:
                    fastest[len(ids), at] = step
    for step in fastest.values():
        meter.step_time.observe(*step)
    meter.learns = True
