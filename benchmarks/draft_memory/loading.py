"""Cost of loading an operator corpus, for the engine that it is loaded into.

The engine's thread takes the corpus in calls between steps (`retrieval.corpus_manager`): 8 million
tokens in documents of 4,000 tokens, once into memory that is allocated at the beginning, and once
into memory that grows with the documents.

- ``loading.begin_ms``: the call that allocates the memory
- ``loading.call_ms``, ``loading.call_max_ms``: the calls that take documents, median and longest
- ``loading.calls``, ``loading.total_s``: number of these calls, and their total time
- ``loading.growing.call_max_ms``: the longest call if the memory grows
"""

from __future__ import annotations

import time
from statistics import median
from typing import Any

import numpy as np

from headrace_decode.speculative.retrieval.corpus_manager import CorpusManager
from headrace_decode.speculative.retrieval.draft_memory import DraftMemory, MemorySettings

CORPUS_TOKENS, DOCUMENT_TOKENS, DOCUMENTS_A_CALL = 8_000_000, 4_000, 5
CAPACITY_BYTES = 512 << 20


def measure() -> dict[str, float]:
    """Return the milliseconds of the engine's thread, and seconds in all."""
    _load(DOCUMENT_TOKENS, reserved=True)  # compiles
    begin_s, calls_s = _load(CORPUS_TOKENS, reserved=True)
    _, growing_s = _load(CORPUS_TOKENS, reserved=False)
    return {
        "loading.begin_ms": 1e3 * begin_s,
        "loading.call_ms": 1e3 * median(calls_s),
        "loading.call_max_ms": 1e3 * max(calls_s),
        "loading.calls": float(len(calls_s)),
        "loading.total_s": begin_s + sum(calls_s),
        "loading.growing.call_max_ms": 1e3 * max(growing_s),
    }


def _load(tokens: int, *, reserved: bool) -> tuple[float, list[float]]:
    """Return the seconds of the call that begins, and of each that loads."""
    rng = np.random.default_rng(1)
    corpora = CorpusManager(DraftMemory(MemorySettings(CAPACITY_BYTES)))
    version: dict[str, Any] = {"corpus": "c", "version": 1}
    expected = tokens + tokens // 100 if reserved else 0
    begin_s = _timed(corpora, {"do": "begin", **version, "tokens": expected})[0]
    calls_s, done = [], 0
    while done < tokens:
        waiting = rng.integers(0, 50_000, (DOCUMENTS_A_CALL, DOCUMENT_TOKENS)).tolist()
        while waiting:
            spent_s, answer = _timed(corpora, {"do": "load", **version, "sequences": waiting})
            calls_s.append(spent_s)
            waiting = waiting[answer["taken"] :]
            done += answer["tokens"]
    return begin_s, calls_s


def _timed(corpora: CorpusManager, command: dict[str, Any]) -> tuple[float, dict[str, Any]]:
    start = time.perf_counter()
    answer = corpora.command(command)
    return time.perf_counter() - start, answer
