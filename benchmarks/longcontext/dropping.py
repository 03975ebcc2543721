"""Four long contexts at once in an engine that drops three quarters of their KV.

    python -m benchmarks.longcontext.dropping --json FILE [--predictor FILE]

SmolLM2 in bfloat16 on one thread. Four requests come together, each with a prompt of 4,000 tokens
and an answer of 2,000. One engine has room for all of them. The other has room for one whole
context, for what reads it again, and for what is kept of the other three (docs/compression.md).
With a file of `headrace lab calibrate compression` it does not read them again, and a third engine
streams them: it has room for what is kept of all four, and a segment. Each engine is a process of
its own; blocks are the scheduler's.

    cache_vs_contexts       blocks of the small engine's cache, over those of the four contexts in
                            full with their answers
    held_vs_contexts        blocks that its requests hold while all four answer over what they kept,
                            over those of the same contexts in full with the same answers; median
    itl_vs_exact            median seconds of a step in which all four answer and nothing else is
                            computed, over those of the large engine
    read_vs_exact           what such a step reads, the weights and the blocks that are held, over
                            the large engine's: what the plan for a target takes `itl_vs_exact` for
    itl.NAME_ms, itl.NAME_steps   of each, and how many steps these are
    serving_vs_exact        from the first request to the last token, over the large engine's
    streamed.NAME           the same of the third engine; `most_vs_cache`: most blocks that its
                            requests ever held, over those of its cache
"""

from __future__ import annotations

import math
import statistics
import time
from pathlib import Path
from typing import Any

from benchmarks.longcontext.pool import apart
from benchmarks.sparse.serving import Engine, report
from headrace.model import resolve
from headrace.model.facts import describe
from headrace_decode.attention.settings import SparseSettings
from headrace_decode.compression.engine.compression_job import (
    EARLIER_TOKENS,
    SEGMENT_TOKENS,
    retained_blocks,
)
from headrace_decode.compression.engine.settings import CompressionSettings
from headrace_decode.compression.scores import LEAD_TOKENS, PART_TOKENS
from headrace_engine.extensions.extension import EXTENSIBLE_SCHEDULERS

AT_ONCE, PROMPT, ANSWER, SHARE = 4, 4000, 2000, 0.25
BLOCK_TOKENS, BATCH_TOKENS = 128, 512
MIN_STEPS = 20

Figures = dict[str, float]


def blocks_of(tokens: int) -> int:
    return math.ceil(tokens / BLOCK_TOKENS)


WHOLE = blocks_of(PROMPT + ANSWER)
KEPT = retained_blocks(PROMPT // BLOCK_TOKENS, SHARE, BLOCK_TOKENS)
TAIL = blocks_of(PROMPT % BLOCK_TOKENS + ANSWER)
"""Blocks in which a context is kept: a part of its prompt's, and all after these."""
OTHERS = (AT_ONCE - 1) * (KEPT + TAIL)
SMALL = WHOLE + blocks_of(EARLIER_TOKENS + LEAD_TOKENS + PART_TOKENS + 1) + OTHERS
"""Blocks of a cache whose contexts are read again one after the other, so that one is whole."""
STREAMED = KEPT + max(TAIL, blocks_of(SEGMENT_TOKENS) + blocks_of(BATCH_TOKENS)) + OTHERS
"""Blocks of a cache whose contexts are compressed while they are computed."""


def served(
    cache_blocks: int, share: float | None, predictor: str | None = None, stream: bool = False
) -> dict[str, Any]:
    """All prompts at once in an engine with so many blocks: seconds of its steps."""
    engine = Engine(
        SparseSettings("off"),
        CompressionSettings(calibration=predictor, stream=stream),
        num_gpu_blocks_override=cache_blocks + 1,  # vLLM's null block
        max_num_batched_tokens=BATCH_TOKENS,
        max_num_seqs=2 * AT_ONCE,
        async_scheduling=False,
        scheduler_cls=EXTENSIBLE_SCHEDULERS[False],
    )
    scheduler = engine.llm.llm_engine.engine_core.engine_core.scheduler
    pool, following = scheduler.kv_cache_manager.block_pool, engine.bound.compression
    if following is None:
        raise RuntimeError("this engine bounds no contexts; its log says why")
    prompts = engine.prompts(PROMPT, AT_ONCE)
    names = [engine.add(prompt, ANSWER, share, technique="compression") for prompt in prompts]
    lengths = dict.fromkeys(names, 0)
    dropped = 0 if share is None else AT_ONCE
    begun_s, pure, held, most = time.perf_counter(), list[float](), list[float](), 0
    read = list[int]()
    for step in engine.steps():
        taken = pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()
        most = max(most, taken)
        if following.dropped == dropped and all(0 < n < ANSWER for n in lengths.values()):
            pure.append(step.seconds)
            read.append(taken)
            held.append(taken / sum(blocks_of(PROMPT + n) for n in lengths.values()))
        for name, each in step.outputs.items():
            lengths[name] += len(each.token_ids)
    if any(length != ANSWER for length in lengths.values()):
        raise RuntimeError(f"not all were answered: {lengths}")
    if len(pure) < MIN_STEPS:
        raise RuntimeError(f"all {AT_ONCE} answered in {len(pure)} steps, {MIN_STEPS} are needed")
    seconds = time.perf_counter() - begun_s
    return {
        "steps": pure,
        "held": held,
        "read": read_bytes(statistics.median(read)),
        "seconds": seconds,
        "most": most / cache_blocks,
    }


def read_bytes(blocks: float) -> float:
    """Return the bytes that a step reads if it attends to all of so many blocks."""
    facts = describe(resolve(None))
    assert facts.params is not None
    return facts.params * facts.dtype_bytes + blocks * BLOCK_TOKENS * facts.kv_bytes_per_token


def measured(predictor: Path | None) -> Figures:
    """Return the figures."""
    file = None if predictor is None else str(predictor)
    few = apart(served, SMALL, SHARE, file)
    many = apart(served, AT_ONCE * WHOLE, None)
    runs = {"compression": few, "exact": many}
    found = compared(few, many, SMALL)
    if file is not None:
        runs["streamed"] = apart(served, STREAMED, SHARE, file, True)
        streamed = compared(runs["streamed"], many, STREAMED)
        streamed["most_vs_cache"] = runs["streamed"]["most"]
        found |= {f"streamed.{name}": each for name, each in streamed.items()}
    return {
        **found,
        **{f"itl.{name}_ms": 1e3 * statistics.median(run["steps"]) for name, run in runs.items()},
        **{f"itl.{name}_steps": float(len(run["steps"])) for name, run in runs.items()},
        "serving.exact_s": many["seconds"],
    }


def compared(run: dict[str, Any], exact: dict[str, Any], cache_blocks: int) -> Figures:
    """Return the figures of a small engine over those of the large one."""
    return {
        "cache_vs_contexts": cache_blocks / (AT_ONCE * WHOLE),
        "held_vs_contexts": statistics.median(run["held"]),
        "itl_vs_exact": statistics.median(run["steps"]) / statistics.median(exact["steps"]),
        "read_vs_exact": run["read"] / exact["read"],
        "serving_vs_exact": run["seconds"] / exact["seconds"],
    }


if __name__ == "__main__":
    report(__doc__, measured, "predictor")
