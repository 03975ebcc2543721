"""What drafting costs: microseconds a query and a token kept, bytes a token, and other tenants.

A memory is filled with the answers of a corpus, then 64 requests of it are walked side by side, as
an engine's steps would: one call drafts for all rows, one extends them. Arctic's cache is called
once a request, as vLLM calls it. Everything is the median over repeats; the arms take turns.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import numpy as np
from numpy.typing import NDArray

from benchmarks.drafting.arms import ARCTIC_DEPTH, ARCTIC_FACTOR, ARCTIC_LEAST, Arctic
from benchmarks.drafting.corpora import Exchange
from headrace_decode.speculation.memory import PUBLIC_KEY, Memory, Settings, tenant_key

ROWS = 64
STEPS = 48
DRAFT_TOKENS = 8
CAPACITY_BYTES = 64 << 20


def filled(exchanges: list[Exchange], capacity_bytes: int = CAPACITY_BYTES) -> Memory:
    """A memory with the answers of all exchanges, under the tenant ""."""
    memory = Memory(Settings(capacity_bytes=capacity_bytes, replica=1))
    for exchange in exchanges:
        _keep(memory, exchange.answer, "")
    return memory


def _keep(memory: Memory, tokens: NDArray[np.int32], tenant: str) -> None:
    handle = memory.open_request("", tokens[:0], tenant)
    memory.extend(handle, tokens)
    memory.close_request(handle)


def query_us(memory: Memory, arctic: Arctic, exchanges: list[Exchange]) -> dict[str, float]:
    """Seconds of drafting and extending, of both arms, over steps of ROWS requests."""
    rows = [each for each in exchanges if len(each.answer) > STEPS + 1][:ROWS]
    if len(rows) < ROWS:
        rows = (rows * ROWS)[:ROWS]
    handles = [memory.open_request("", row.prompt) for row in rows]
    one = memory.open_request("", rows[0].prompt)
    for number, row in enumerate(rows):
        arctic.cache.start_request(("cost", number), row.prompt)
    times: dict[str, list[float]] = {"query": [], "extend": [], "single": [], "arctic.query": []}
    counts = np.ones(ROWS, np.int32)
    for step in range(STEPS):
        fresh = np.array([row.answer[step] for row in rows], np.int32)
        start = time.perf_counter()
        memory.extend_many(handles, fresh, counts)
        extended = time.perf_counter()
        memory.draft_many(handles, DRAFT_TOKENS)
        drafted = time.perf_counter()
        times["extend"].append((extended - start) / ROWS)
        times["query"].append((drafted - extended) / ROWS)
        memory.extend(one, fresh[:1])
        start = time.perf_counter()
        memory.draft(one, DRAFT_TOKENS)
        times["single"].append(time.perf_counter() - start)
        contexts = []
        for number, row in enumerate(rows):
            arctic.cache.add_active_response(("cost", number), fresh[number : number + 1])
            whole = np.concatenate([row.prompt[-ARCTIC_DEPTH:], row.answer[: step + 1]])
            contexts.append(whole[-ARCTIC_DEPTH:])
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
    for handle in [*handles, one]:
        memory.close_request(handle, keep=False)
    for number in range(ROWS):
        arctic.cache.stop_request(("cost", number))
        arctic.cache.evict_cached_response(("cost", number))
    return {f"{name}_us": 1e6 * median(values) for name, values in times.items()}


def insert_us_per_token(exchanges: list[Exchange], repeats: int = 7) -> dict[str, float]:
    """A document of many tokens into the memory; the same into Arctic's tree."""
    tokens = np.concatenate([exchange.answer for exchange in exchanges])[:131072]
    ours, theirs = [], []
    for _ in range(repeats):
        memory = Memory(Settings(capacity_bytes=CAPACITY_BYTES, replica=1))
        memory.pool.reserve(PUBLIC_KEY, len(tokens) + 4096, 0.0)
        start = time.perf_counter()
        memory.add_to_corpus("corpus", 1, [tokens])
        ours.append((time.perf_counter() - start) / len(tokens))
        arctic = Arctic()
        arctic.open(tokens[:0])
        start = time.perf_counter()
        for at in range(0, len(tokens), 8192):
            arctic.cache._global_tree.extend_ndarray(0, tokens[at : at + 8192])
        theirs.append((time.perf_counter() - start) / len(tokens))
    return {
        "insert_us_per_token": 1e6 * median(ours),
        "arctic.insert_us_per_token": 1e6 * median(theirs),
    }


def bytes_per_token(exchanges: list[Exchange]) -> dict[str, float]:
    """Bytes used over tokens held: of a memory that grew as it liked, mean over its growth, and of
    one that is full."""
    growing = Memory(Settings(capacity_bytes=CAPACITY_BYTES, replica=1))
    ratios = []
    for number, exchange in enumerate(exchanges):
        _keep(growing, exchange.answer, "")
        stats = growing.stats()
        if number >= len(exchanges) // 4:
            ratios.append(stats["used_bytes"] / stats["kept_tokens"])
    full = filled(exchanges, max(int(growing.stats()["used_bytes"]) // 2, 1 << 20)).stats()
    return {
        "bytes_per_token": float(np.mean(ratios)),
        "full.bytes_per_token": full["capacity_bytes"] / full["kept_tokens"],
    }


def isolation(exchanges: list[Exchange], repeats: int = 41) -> dict[str, float]:
    """Whether another tenant's secret is drafted, or shows in the time that a look-up takes.

    Two memories differ in what tenant "a" has stored: the prober's own texts, or others. Tenant
    "b" asks for the same contexts in both, in turns. `null` is the same comparison between two
    memories that do not differ: what the machine's noise alone gives.
    """
    secrets, others = exchanges[::2], exchanges[1::2]
    with_secret, without, again = (Memory(Settings(replica=1)) for _ in range(3))
    for memory, texts in ((with_secret, secrets), (without, others), (again, others)):
        for exchange in texts:
            _keep(memory, exchange.answer, "a")
    asked = [exchange.answer[:32] for exchange in secrets[:ROWS]]
    probes = []
    for memory in (with_secret, without, again):
        probes.append((memory, [memory.open_request("", each, "b") for each in asked]))
    memory, handles = probes[0]
    mine = [memory.open_request("", each, "a") for each in asked]
    found = int(memory.draft_many(handles, 16).lengths.sum())
    owner = int(memory.draft_many(mine, 16).lengths.sum())
    own = _own_only(asked)
    times: list[list[float]] = [[], [], []]
    for repeat in range(repeats):
        for index in np.roll(np.arange(3), repeat):
            memory, handles = probes[index]
            start = time.perf_counter()
            for _ in range(20):
                memory.draft_many(handles, 16)
            times[index].append((time.perf_counter() - start) / 20 / len(handles))
    base = median(times[1])
    return {
        "isolation.foreign_tokens_drafted": float(found - own),
        "isolation.owner_tokens_drafted": float(owner),
        "isolation.time_ratio": median(times[0]) / base,
        "isolation.null_time_ratio": median(times[2]) / base,
    }


def _own_only(asked: list[NDArray[np.int32]]) -> int:
    """Tokens drafted for these prompts by a memory that holds nothing else."""
    memory = Memory(Settings(replica=1))
    handles = [memory.open_request("", each, "b") for each in asked]
    return int(memory.draft_many(handles, 16).lengths.sum())


def measure(exchanges: list[Exchange], repeats: int = 5) -> dict[str, float]:
    """All costs on one corpus."""
    memory, arctic = filled(exchanges), Arctic()
    for exchange in exchanges:
        arctic.open(exchange.prompt[:0])
        arctic.extend(exchange.answer)
        arctic.close()
    rounds = [query_us(memory, arctic, exchanges) for _ in range(repeats)]
    figures = {name: median(each[name] for each in rounds) for name in rounds[0]}
    parts: list[Callable[[list[Exchange]], dict[str, float]]] = [
        insert_us_per_token,
        bytes_per_token,
        isolation,
    ]
    for part in parts:
        figures |= part(exchanges)
    row = memory.pool.find(tenant_key(""))
    assert row is not None
    return figures | {"kept_tokens": memory.stats()["kept_tokens"]}
