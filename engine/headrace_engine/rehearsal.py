"""Measures the first step times before an engine serves: the engine computes a text's beginnings up
to three times each, and a few answers at once.

Without these times the first plans would rest on a prior that knows neither machine nor model. Of
each step the fastest of the three times is learned. A new engine makes kernels, imports modules and
touches memory during its first steps, and other engines start on the same cores: steps took up to
25 times as long as later ones. An engine that seems so slow is not chosen, and so does not learn
better times for a minute.

An engine that is slow even when it is warm computes the long beginnings only once. On a laptop's
two cores, two more rounds take 8 of 62 s of the start, and the fastest of three was 0 to 8 % less
than the first (four engines, two at a time).

The engine has the earlier beginnings in its cache. So the last 384 tokens come after 1,536 others,
and the first 384 came after none: the difference is the cost of attention. Without it a prompt of
4,100 tokens was predicted to take six times its time.

Rows and prompt tokens share a curve, and prompts alone do not show the cost of a row. So the engine
gives 4 and 16 answers at once, each to a prompt of one token. The number of tokens that rows attend
to is known here. The meter's estimate counts whole blocks: 16 rows of four tokens seemed to attend
to 2,000 tokens, so context seemed expensive and rows free.

The steps are kept for the next start of the same engine (`rehearsal_cache`).
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any

from headrace_engine.meter import EngineMeter, Step
from headrace_kvstore.identity.salts import isolated_salt

PROMPT_TOKENS = (16, 96, 384, 1536, 1920)
"""Lengths that spread the step-time model's features; cut to what the model and engine take."""
ANSWER_TOKENS = 4
ROWS = (4, 16)
TIMES = 3
WARM_TOKENS = 96
"""An engine that knows its step times computes prompts up to this length before it serves, so that
no client waits for its kernels and imports."""
SHORT_TOKENS, SHORT_S = 384, 0.4
"""If the prompts of at most `SHORT_TOKENS` together take longer than `SHORT_S` in the second round,
only they are repeated. The first round does not count: a GPU's kernels are made in it, which takes
seconds."""

Generate = Callable[[list[int], int, str, str], AsyncGenerator[Any, None]]
"""(prompt, tokens to answer, request id, salt) -> the engine's outputs."""


def rehearsal_prompts(max_model_len: int, vocabulary: int) -> list[list[int]]:
    """Return a beginning of each length, as token ids."""
    limit = max_model_len - ANSWER_TOKENS - 1
    lengths = sorted({min(length, limit) for length in PROMPT_TOKENS})
    return [[7919 * i % vocabulary for i in range(length)] for length in lengths]


async def rehearse(
    generate: Generate,
    meter: EngineMeter,
    prompts: list[list[int]],
    most_rows: int,
    clock: Callable[[], float] = time.monotonic,
    known: Sequence[Step] = (),
) -> list[Step]:
    """Compute each prompt, and answers at once, up to `TIMES` times; `meter` learns the fastest of
    each step.

    Args:
        most_rows: maximum number of requests that the engine answers at once.
        known: steps of an earlier rehearsal. `meter` learns these instead, and the engine only
            warms up: it computes the prompts of at most `WARM_TOKENS` once, and a few answers.

    Returns:
        The steps that `meter` learned.
    """
    times, row_counts = (1, ROWS[:1]) if known else (TIMES, ROWS)
    prompts = [ids for ids in prompts if not known or len(ids) <= WARM_TOKENS]
    start = uuid.uuid4().hex  # new for each start: the engine may have the last one's KV
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
    for number in range(times):
        name, began_s = f"rehearsal-{start}-{number}", clock()
        # No client asks for these prompts, so they are not stored.
        salt = isolated_salt(name, "rehearsal")
        for ids in prompts:
            if number and len(ids) > SHORT_TOKENS and clock() - began_s > SHORT_S:
                break
            steps.clear()
            await answer(ids, f"{name}-{len(ids)}", salt)
            answered = 0
            for at, step in enumerate(steps):
                answered += step.rows
                keep((len(ids), at), step, len(ids) + answered)
        for asked in row_counts:
            rows = min(asked, most_rows)
            steps.clear()
            answers = (answer(prompts[0][:1], f"{name}-{rows}-{n}", salt) for n in range(rows))
            await asyncio.gather(*answers)
            for step in steps:
                if step.rows == rows:  # all have begun, and none has ended
                    keep((0, asked), step, rows * ANSWER_TOKENS / 2)
    meter.on_step.remove(see)
    learned = list(known) or list(fastest.values())
    for step in learned:
        meter.step_time.observe(*step)
    meter.learns = True
    return learned
