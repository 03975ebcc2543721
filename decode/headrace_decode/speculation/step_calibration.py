"""First step times, before an engine serves: a few requests whose drafts mean nothing.

Without them the first budgets would rest on a prior that knows neither machine nor model.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

from headrace_decode.speculation.request import CALIBRATION_LENGTHS, REQUEST_KEY

logger = logging.getLogger("headrace.speculation")

ROWS = (1, 8, 32)
"""At once; cut to what the engine takes."""
PROMPT_TOKENS = 16

Generate = Callable[[list[int], dict[str, Any], int, str], AsyncGenerator[Any, None]]
"""(prompt, extra_args, tokens to answer, request id) -> the engine's outputs."""


async def calibrate_steps(generate: Generate, rows_max: int, vocabulary: int) -> None:
    """Run each batch for a step of every calibration length; a failure costs the measurement."""
    started_s, answer_tokens = time.perf_counter(), len(CALIBRATION_LENGTHS) + 2

    async def run(number: int, rows: int) -> None:
        prompt = [(7919 * (i + 31 * number + rows)) % vocabulary for i in range(PROMPT_TOKENS)]
        name = f"calibrate-drafts-{rows}-{number}"
        extra = {REQUEST_KEY: {"calibrates": True}}
        async with aclosing(generate(prompt, extra, answer_tokens, name)) as outputs:
            async for _ in outputs:
                pass

    try:
        for rows in sorted({min(rows, rows_max) for rows in ROWS}):
            await asyncio.gather(*(run(number, rows) for number in range(rows)))
    except Exception:
        logger.exception("step times are learned from the first requests instead")
    logger.info("step times measured in %.1f s", time.perf_counter() - started_s)
