"""Time to first token of a prompt whose prefix is in the store, against a cold one.

One engine computes prompts and saves them, a StoreNode writes them to disk in the background, and
the engine ends. Another engine, which saves nothing, then takes in turns one of these prompts,
which is in DRAM, and a new one. Then the arena is emptied, and the same prompts come from NVMe:
from files that are written and read with O_DIRECT, without the page cache. The engine's own prefix
cache is emptied before each prompt. A prompt has 47 full blocks, 6,016 tokens, that can be found,
and 32 more tokens.
"""

from __future__ import annotations

from typing import Any

from benchmarks.kvstore.child import Child
from benchmarks.kvstore.engines import engines, node, store
from benchmarks.kvstore.timing import Figures, ratios

PREFIX, TAIL, BLOCK = 6_016, 32, 128
ROUNDS, QUICK_ROUNDS = 3, 1
COLD_SEED = 1_000
WRITE_S = 60.0
"""Longest time until the node has written everything."""
ENGINE_CUT = {"block_bytes": 30 * 196_608, "layers": 30}
"""SmolLM2-135M in float32: what the node makes the arena for."""


def measure(figures: Figures, quick: bool = False) -> None:
    rounds = QUICK_ROUNDS if quick else ROUNDS
    warm_up = rounds  # one more prompt, whose loads only warm the code
    with store("2GiB") as settings, node({**settings, **ENGINE_CUT}) as tool:
        with engines(settings) as [writer]:
            for number in range(rounds + 1):
                writer.do("first_token", tokens=PREFIX + TAIL, seed=number)
                writer.do("settle")
        blocks = (rounds + 1) * PREFIX // BLOCK
        tool.wait_for(lambda stats: stats["tiers"]["nvme"]["blocks"] >= blocks, WRITE_S)
        with engines({**settings, "save": False}) as [reader]:
            taken: dict[str, list[float]] = {"dram": [], "cold": [], "nvme": []}
            _found(reader, warm_up)
            for number in range(rounds):
                taken["dram"].append(_found(reader, number))
                taken["cold"].append(_unseen(reader, number))
            tool.forget_dram()
            _found(reader, warm_up)
            for number in range(rounds):
                taken["nvme"].append(_found(reader, number))
    for tier in ("dram", "nvme"):
        figures.add(f"ttft.{tier}_vs_cold", ratios(taken[tier], taken["cold"]))
        figures.add(f"ttft.{tier}_s", taken[tier])
    figures.add("ttft.cold_s", taken["cold"])
    figures.note(
        "ttft",
        f"SmolLM2-135M in float32 on one thread, {PREFIX} tokens found and {TAIL} computed, "
        "found by another engine than the one that wrote them",
    )


def _found(reader: Child, seed: int) -> float:
    seconds, found = _first_token(reader, seed)
    if found != PREFIX:
        raise RuntimeError(f"{found} of {PREFIX} tokens were found in the store")
    return seconds


def _unseen(reader: Child, number: int) -> float:
    seconds, found = _first_token(reader, COLD_SEED + number)
    if found:
        raise RuntimeError(f"{found} tokens of an unseen prompt were found")
    return seconds


def _first_token(reader: Child, seed: int) -> tuple[float, int]:
    answer: Any = reader.do("first_token", tokens=PREFIX + TAIL, seed=seed)
    return answer[0], answer[1]
