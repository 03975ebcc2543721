"""Cost of drafting, and Arctic's: microseconds a look-up and a token kept, bytes a token.

Both arms keep the same KEPT_TOKENS tokens of the standard library, in pieces as long as an answer.
Each figure is the median over repeats of the median over steps.

- ``query_us``: one look-up, that is one request's draft of at most DRAFT_TOKENS tokens with their
  survivals, in a step of ROWS requests: the time of `OneRowMemory.draft_many` over ROWS. The
  requests walk through kept text: nearly every look-up finds places and walks a whole draft.
- ``cold.query_us``: the same where the step before it read BETWEEN_BYTES of something else, as an
  engine reads its weights.
- ``single_us``: a look-up in a step of one request, where the call from Python is most of it.
- ``extend_us``: appending one accepted token to a request's own index, in a step of ROWS.
- ``arctic.``: one call of `speculate`, which is how vLLM calls it, for the same contexts.
- ``insert_us_per_token``: `OneRowMemory.insert`, answer by answer, into a memory that is full and
  evicts, as one is after its first hours. ``growing.``: into one that begins empty, with the cost
  of moving its tokens into larger partitions. ``arctic.``: its tree over past answers only, which
  grows.
- ``bytes_per_token``: bytes taken over tokens kept, mean over the growth from a quarter on;
  ``full.``: the capacity of a memory that evicts over what it keeps.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import mean, median

import numpy as np
from numpy.typing import NDArray

from benchmarks.draft_memory.arms import ARCTIC_DEPTH, ARCTIC_FACTOR, ARCTIC_LEAST, Arctic
from benchmarks.draft_memory.one_row import OneRowMemory
from headrace_decode.speculative.draft_batch import DraftSource
from headrace_decode.speculative.retrieval.draft_memory import MemorySettings, tenant_key
from headrace_decode.speculative.retrieval.partition_pool import SegmentInfo

ROWS = 64
STEPS = 48
DRAFT_TOKENS = 8
PROMPT_TOKENS = 256
KEPT_TOKENS = 1 << 20
CAPACITY_BYTES = 256 << 20
BETWEEN_BYTES = 64 << 20
_KEY = tenant_key("")

Texts = list[NDArray[np.int32]]


def fill(memory: OneRowMemory, texts: Texts) -> float:
    """Keep these answers of the tenant ""; seconds that it took."""
    info = SegmentInfo(source=DraftSource.RESPONSE, created_s=memory.clock())
    start = time.perf_counter()
    for text in texts:
        memory.insert(_KEY, text, info)
    return time.perf_counter() - start


def fill_arctic(arctic: Arctic, texts: Texts) -> float:
    """Keep these answers in the tree over past answers; seconds that it took."""
    tree, start = arctic.cache._global_tree, time.perf_counter()
    for number, text in enumerate(texts):
        tree.extend_ndarray(number, text)
    return time.perf_counter() - start


def query(
    memory: OneRowMemory, arctic: Arctic, texts: Texts, between: Callable[[], object]
) -> dict[str, float]:
    """Microseconds of a look-up and of an append, medians over steps of ROWS requests. `between`
    is called before each step's look-ups."""
    rows = [texts[7 * at % len(texts)] for at in range(ROWS)]
    handles = [memory.open_request("", row[:PROMPT_TOKENS]) for row in rows]
    times: dict[str, list[float]] = {"query": [], "extend": [], "single": [], "arctic.query": []}
    counts, drafted = np.ones(ROWS, np.int32), 0
    for end in range(PROMPT_TOKENS, PROMPT_TOKENS + STEPS):
        fresh = np.array([row[end] for row in rows], np.int32)
        start = time.perf_counter()
        memory.extend_many(handles, fresh, counts)
        times["extend"].append((time.perf_counter() - start) / ROWS)
        between()
        start = time.perf_counter()
        batch = memory.draft_many(handles, DRAFT_TOKENS)
        times["query"].append((time.perf_counter() - start) / ROWS)
        drafted += int(batch.lengths.sum())
        start = time.perf_counter()
        memory.draft(handles[0], DRAFT_TOKENS)
        times["single"].append(time.perf_counter() - start)
    for handle in handles:
        memory.close_request(handle, keep=False)
    for number, row in enumerate(rows):
        arctic.cache.start_request(("cost", number), row[:PROMPT_TOKENS])
    for end in range(PROMPT_TOKENS, PROMPT_TOKENS + STEPS):
        for number, row in enumerate(rows):
            arctic.cache.add_active_response(("cost", number), row[end : end + 1])
        contexts = [row[end + 1 - ARCTIC_DEPTH : end + 1] for row in rows]
        between()
        start = time.perf_counter()
        for number, context in enumerate(contexts):
            arctic.cache.speculate(
                ("cost", number),
                context,
                max_spec_tokens=DRAFT_TOKENS,
                max_spec_factor=ARCTIC_FACTOR,
                min_token_prob=ARCTIC_LEAST,
            )
        times["arctic.query"].append((time.perf_counter() - start) / ROWS)
    for number in range(ROWS):
        arctic.cache.stop_request(("cost", number))
        arctic.cache.evict_cached_response(("cost", number))
    found = {f"{name}_us": 1e6 * median(values) for name, values in times.items()}
    return found | {"query.tokens_drafted": drafted / ROWS / STEPS}


def insert(texts: Texts) -> dict[str, float]:
    """Return the microseconds a token to keep these answers."""
    tokens = sum(map(len, texts))
    full = OneRowMemory(MemorySettings(capacity_bytes=20 * tokens, replica=1))
    fill(full, texts)
    growing = OneRowMemory(MemorySettings(capacity_bytes=CAPACITY_BYTES, replica=1))
    return {
        "insert_us_per_token": 1e6 * fill(full, texts) / tokens,
        "growing.insert_us_per_token": 1e6 * fill(growing, texts) / tokens,
        "arctic.insert_us_per_token": 1e6 * fill_arctic(Arctic(), texts) / tokens,
    }


def size(texts: Texts) -> dict[str, float]:
    """Return the bytes a token."""
    growing, ratios = OneRowMemory(MemorySettings(capacity_bytes=CAPACITY_BYTES, replica=1)), []
    for start in range(0, len(texts), 16):
        fill(growing, texts[start : start + 16])
        if start >= len(texts) // 4:
            stats = growing.stats()
            ratios.append(stats["used_bytes"] / stats["kept_tokens"])
    full = OneRowMemory(
        MemorySettings(capacity_bytes=int(growing.stats()["used_bytes"]) // 2, replica=1)
    )
    fill(full, texts)
    arctic = Arctic()
    fill_arctic(arctic, texts)
    return {
        "bytes_per_token": mean(ratios),
        "full.bytes_per_token": full.stats()["capacity_bytes"] / full.stats()["kept_tokens"],
        "arctic.bytes_per_token": arctic.cache._global_tree.estimate_memory()
        / sum(map(len, texts)),
    }


def measure(texts: Texts, repeats: int = 5) -> dict[str, float]:
    """All costs; `texts` are longer than PROMPT_TOKENS + STEPS."""
    memory, arctic = OneRowMemory(MemorySettings(CAPACITY_BYTES, floor=0.0, replica=1)), Arctic()
    fill(memory, texts)
    fill_arctic(arctic, texts)
    weights, rounds = np.ones(BETWEEN_BYTES // 8), []
    query(memory, arctic, texts, lambda: None)
    for _ in range(repeats):
        found = query(memory, arctic, texts, lambda: None) | insert(texts)
        cold = query(memory, arctic, texts, weights.sum)
        found |= {f"cold.{name}": cold[name] for name in ("query_us", "arctic.query_us")}
        rounds.append(found)
    figures = {name: median(each[name] for each in rounds) for name in rounds[0]}
    return figures | size(texts) | {"kept_tokens": memory.stats()["kept_tokens"]}
