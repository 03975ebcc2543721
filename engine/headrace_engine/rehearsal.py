"""First step times, before an engine serves: a text's beginnings, each computed up to three times,
and a few answers at once.

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

Rows and prompt tokens share a curve, and prompts alone do not tell what a row costs: to one token
each, 4 and 16 answers are given at once. What rows attend to is known here. The meter's estimate
counts whole blocks, so 16 rows of four tokens seemed to attend to 2,000: context looked dear, and
rows looked free.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

from headrace_engine.meter import EngineMeter, Step
from headrace_kvstore.salts import marked

PROMPT_TOKENS = (16, 96, 384, 1536, 1920)
"""Lengths that spread the step-time model's features; cut to what the model and engine take."""
ANSWER_TOKENS = 4
ROWS = (4, 16)
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
    most_rows: int,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Compute each prompt, and answers at once, up to `TIMES` times; `meter` learns the fastest of
    each step.

    Args:
        most_rows: the engine answers no more requests at once.
    """
    start = uuid.uuid4().hex  # of this start's own: the engine may remember the last one
    fastest: dict[tuple[int, int], Step] = {}

    async def answer(ids: list[int], name: str, salt: str) -> None:
        async with aclosing(generate(ids, ANSWER_TOKENS, name, salt)) as outputs:
            async for _ in outputs:
                pass

    def keep(kind: tuple[int, int], step: Step, context: float) -> None:
        step = step._replace(context=context if step.rows else 0.0)
        if kind not in fastest or step.seconds < fastest[kind].seconds:
            fastest[kind] = step

    steps: list[Step] = []
    see = steps.append
    meter.learns = False
    meter.on_step.append(see)
    for number in range(TIMES):
        name, began_s = f"rehearsal-{start}-{number}", clock()
        salt = marked(name, "rehearsal")  # no client asks for these prompts, so they are not stored
        for ids in prompts:
            if number and len(ids) > SHORT_TOKENS and clock() - began_s > SHORT_S:
                break
            steps.clear()
            await answer(ids, f"{name}-{len(ids)}", salt)
            answered = 0
            for at, step in enumerate(steps):
                answered += step.rows
                keep((len(ids), at), step, len(ids) + answered)
        for asked in ROWS:
            rows = min(asked, most_rows)
            steps.clear()
            answers = (answer(prompts[0][:1], f"{name}-{rows}-{n}", salt) for n in range(rows))
            await asyncio.gather(*answers)
            for step in steps:
                if step.rows == rows:  # all have begun, and none has ended
                    keep((0, asked), step, rows * ANSWER_TOKENS / 2)
    meter.on_step.remove(see)
    for step in fastest.values():
        meter.step_time.observe(*step)
    meter.learns = True
