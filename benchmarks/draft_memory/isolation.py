"""Test whether one tenant's stored texts show in another's drafts, or in the drafts' timing.

In each trial three memories are built, in random order, equal except for what tenant "a" stored:
``planted`` the secrets that tenant "b" asks about, ``other`` and ``again`` texts of the same
lengths. Tenant "b", which has answers of its own, asks with the secrets' own beginnings, in turns
in all three.

- ``isolation.drafts_changed``: drafts of "b" that differ, in a token or a survival, between
  ``planted`` and ``other``
- ``isolation.timing_ratio``: time of a look-up of "b" with the secrets planted, over that without
- ``isolation.timing_ratio_null``: the same of ``again`` over ``other``, which do not differ;
  ``isolation.timing_noise``: two standard errors of its logarithm over the trials
- ``isolation.owner_timing_ratio``, ``isolation.owner_tokens_drafted``: the same figures for "a"
  itself, to show that the method finds a difference if there is one

All ratios are geometric means over the trials. The clock is read next to the compiled call: a
client outside the process has a less precise clock.
"""

from __future__ import annotations

import random
import time
from statistics import median

import numpy as np
from numpy.typing import NDArray

from benchmarks.draft_memory.corpora import Exchange
from benchmarks.draft_memory.one_row import OneRowMemory
from headrace_decode.speculative.retrieval.draft_memory import MemorySettings

ROWS = 64
KNOWN_TOKENS = 16
DRAFT_TOKENS = 16
TURNS = 15
CALLS = 10
CAPACITY_BYTES = 16 << 20


def _keep(memory: OneRowMemory, tokens: NDArray[np.int32], tenant: str) -> None:
    handle = memory.open_request("", tokens[:0], tenant)
    memory.extend(handle, tokens)
    memory.close_request(handle)


def _times(
    memories: dict[str, OneRowMemory],
    asked: list[NDArray[np.int32]],
    tenant: str,
    order: random.Random,
) -> dict[str, float]:
    """Return the median seconds of a step's look-ups for these prompts, by memory."""
    handles = {
        name: [memory.open_request("", prompt, tenant) for prompt in asked]
        for name, memory in memories.items()
    }
    times: dict[str, list[float]] = {name: [] for name in memories}
    for _ in range(TURNS):
        for name in order.sample(list(memories), len(memories)):
            start = time.perf_counter()
            for _ in range(CALLS):
                memories[name].draft_many(handles[name], DRAFT_TOKENS)
            times[name].append(time.perf_counter() - start)
    return {name: median(values) for name, values in times.items()}


def measure(exchanges: list[Exchange], trials: int = 60, seed: int = 0) -> dict[str, float]:
    """Return all figures, from the answers of these exchanges."""
    order = random.Random(seed)
    answers = [each.answer for each in exchanges if len(each.answer) > 2 * KNOWN_TOKENS]
    third = min(len(answers) // 3, 2 * ROWS)
    pairs = list(zip(answers[:third], answers[third : 2 * third], strict=True))
    secrets = [secret[: len(other)] for secret, other in pairs]
    others = [other[: len(secret)] for secret, other in pairs]
    own = answers[2 * third : 3 * third]
    asked = [secrets[at % third][:KNOWN_TOKENS] for at in range(ROWS)]
    stored = {"planted": secrets, "other": others, "again": others}
    logs: dict[str, list[float]] = {"": [], "null": [], "owner": []}
    changed = found = 0
    for _ in range(trials):
        memories = {}
        for name in order.sample(list(stored), len(stored)):
            memory = memories[name] = OneRowMemory(
                MemorySettings(CAPACITY_BYTES, floor=0.0, replica=1)
            )
            for text in stored[name]:
                _keep(memory, text, "a")
            for text in own:
                _keep(memory, text, "b")
        drafts = {}
        for name in ("planted", "other"):
            handles = [memories[name].open_request("", prompt, "b") for prompt in asked]
            drafts[name] = memories[name].draft_many(handles, DRAFT_TOKENS)
        apart = (drafts["planted"].tokens != drafts["other"].tokens) | (
            drafts["planted"].survival != drafts["other"].survival
        )
        changed += int(apart.any(axis=1).sum())
        owner = [memories["planted"].open_request("", prompt, "a") for prompt in asked]
        found += int(memories["planted"].draft_many(owner, DRAFT_TOKENS).lengths.sum())
        of_b, of_a = (_times(memories, asked, tenant, order) for tenant in "ba")
        logs[""].append(np.log(of_b["planted"] / of_b["other"]))
        logs["null"].append(np.log(of_b["again"] / of_b["other"]))
        logs["owner"].append(np.log(of_a["planted"] / of_a["other"]))
    ratios = {name: float(np.exp(np.mean(values))) for name, values in logs.items()}
    return {
        "isolation.drafts_changed": float(changed),
        "isolation.timing_ratio": ratios[""],
        "isolation.timing_ratio_null": ratios["null"],
        "isolation.timing_noise": float(2 * np.std(logs["null"], ddof=1) / trials**0.5),
        "isolation.owner_timing_ratio": ratios["owner"],
        "isolation.owner_tokens_drafted": found / trials,
    }
