"""Four long contexts at once in an engine whose KV memory is a quarter of theirs.

    python -m benchmarks.longcontext.pool --json FILE

SmolLM2 in bfloat16 on one thread. Four requests come together, each with a prompt of 7,900 tokens.
One engine has KV memory for all of them. The other has a quarter for its cache, the summaries of
all pages, in the cache and in host memory, and the buffer in which KV is made contiguous. It
attends sparsely, and KV that a step does not attend to is in host memory (docs/sparse.md). All
bytes are those of the tensors that the engines made. Each engine is a separate process.

    kv_bytes_vs_contexts    of the small engine, over those of the four contexts in full
    itl_vs_unbounded        median seconds of a step in which all four answer and no prompt is
                            computed, over those of the large engine, sparse in both
    itl_vs_exact            the same over the large engine's own attention
    itl.NAME_ms, itl.NAME_steps   median of each, and the number of steps
    cache_mb, summaries_mb, buffer_mb, host_mb    of the small engine
    peak_blocks_vs_cache    maximum share of the cache's blocks that its requests held
    serving_vs_exact        of the small engine from the first request to the last token, over the
                            large one's, exact
"""

from __future__ import annotations

import math
import multiprocessing
import statistics
import time
from typing import Any

from benchmarks.sparse.serving import Engine, report
from headrace_decode.attention.settings import GIB, SparseSettings
from headrace_engine.extensions.extension import EXTENSIBLE_SCHEDULERS

AT_ONCE, PROMPT, ANSWER, SHARE = 4, 7900, 176, 0.08
BLOCK_TOKENS, BATCH_TOKENS = 128, 256
CACHE = 0.2
"""Share of the contexts' blocks that the small engine's cache holds; the rest of the quarter of the
memory is for summaries and the buffer."""
MIN_STEPS = 20

Figures = dict[str, float]


def blocks() -> int:
    """Return the number of blocks of all contexts."""
    return AT_ONCE * math.ceil((PROMPT + ANSWER) / BLOCK_TOKENS)


def engine_of(cache_blocks: int, host_gib: float) -> Engine:
    """Return an engine with so many blocks, and host memory for what leaves them."""
    return Engine(
        SparseSettings(offload_gib=host_gib),
        num_gpu_blocks_override=cache_blocks + 1,  # vLLM's null block
        max_num_batched_tokens=BATCH_TOKENS,
        max_num_seqs=AT_ONCE,
        async_scheduling=False,
        scheduler_cls=EXTENSIBLE_SCHEDULERS[False],
    )


def served(engine: Engine, prompts: list[list[int]], share: float | None) -> dict[str, Any]:
    """All prompts at once: seconds of steps in which all answer, of all, and most blocks held."""
    scheduler = engine.llm.llm_engine.engine_core.engine_core.scheduler
    pool = scheduler.kv_cache_manager.block_pool
    names = [engine.add(prompt, ANSWER, share) for prompt in prompts]
    lengths = dict.fromkeys(names, 0)
    begun_s, pure, most = time.perf_counter(), [], 0
    for step in engine.steps():
        all_answer = all(0 < length < ANSWER for length in lengths.values())
        if all_answer and step.sparse in (0, AT_ONCE) and (step.sparse > 0) == (share is not None):
            pure.append(step.seconds)
        for name, each in step.outputs.items():
            lengths[name] += len(each.token_ids)
        most = max(most, pool.num_gpu_blocks - 1 - pool.get_num_free_blocks())
    if any(length != ANSWER for length in lengths.values()):
        raise RuntimeError(f"not all were answered: {lengths}")
    if len(pure) < MIN_STEPS:
        raise RuntimeError(f"all {AT_ONCE} answered in {len(pure)} steps, {MIN_STEPS} are needed")
    return {"steps": pure, "seconds": time.perf_counter() - begun_s, "most_blocks": most}


def large() -> dict[str, Any]:
    """Return the figures of the engine whose cache holds all contexts."""
    engine = engine_of(blocks(), 0.0)
    prompts = engine.prompts(PROMPT, AT_ONCE)
    exact = served(engine, prompts, None)
    return {"exact": exact, "sparse": served(engine, prompts, SHARE)}


def small(cache_blocks: int, host_gib: float) -> dict[str, Any]:
    """Return the figures of the engine whose cache holds a part of the contexts."""
    engine = engine_of(cache_blocks, host_gib)
    memory = engine.bound.offloading
    if memory is None or engine.bound.summary_table is None:
        raise RuntimeError("this engine does not offload; its log says why")
    caches = [each.cache for each in memory.memory.layers]
    bytes_ = {
        "cache": sum(each.numel() * each.element_size() for each in caches),
        "summaries": engine.bound.summary_table.nbytes,
        "buffer": memory.memory.staging_bytes,
        "host": memory.memory.host_bytes,
    }
    found = served(engine, engine.prompts(PROMPT, AT_ONCE), SHARE)
    return {"bytes": bytes_, "offloaded": found}


def apart(function: Any, *arguments: Any) -> Any:
    """Call a function in a separate process, and return its result."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, arguments)


def measured() -> Figures:
    """Return the figures."""
    from headrace.model import resolve
    from headrace.model.facts import describe

    whole, block = blocks(), BLOCK_TOKENS * describe(resolve(None)).kv_bytes_per_token
    cache_blocks = math.floor(CACHE * whole)
    # Host memory is promised by whole contexts of the longest answer.
    few = apart(small, cache_blocks, (whole + AT_ONCE) * block / GIB)
    print(few["bytes"], flush=True)
    many = apart(large)
    runs = {"offloaded": few["offloaded"], **many}
    itl = {name: statistics.median(run["steps"]) for name, run in runs.items()}
    used = sum(few["bytes"][part] for part in ("cache", "summaries", "buffer"))
    return {
        "kv_bytes_vs_contexts": used / (whole * block),
        "itl_vs_unbounded": itl["offloaded"] / itl["sparse"],
        "itl_vs_exact": itl["offloaded"] / itl["exact"],
        **{f"itl.{name}_ms": 1e3 * each for name, each in itl.items()},
        **{f"itl.{name}_steps": float(len(run["steps"])) for name, run in runs.items()},
        **{f"{part}_mb": each / 1e6 for part, each in few["bytes"].items()},
        "peak_blocks_vs_cache": few["offloaded"]["most_blocks"] / cache_blocks,
        "serving_vs_exact": few["offloaded"]["seconds"] / many["exact"]["seconds"],
    }


if __name__ == "__main__":
    report(__doc__, measured)
