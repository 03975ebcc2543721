"""Time to first token of a prompt whose prefix is in the node's DRAM, against a cold one.

One engine computes prompts and saves them, and ends. Another one, which saves nothing, then takes
in turns one of these prompts and one that nobody has seen. Its own prefix cache is emptied before
each. A prompt is 47 full blocks, 6,016 tokens, that can be found, and 32 more.
"""

from __future__ import annotations

from benchmarks.kvstore.engines import engines, store
from benchmarks.kvstore.timing import Figures, ratios

PREFIX, TAIL = 6_016, 32
ROUNDS, QUICK_ROUNDS = 3, 1
COLD_SEED = 1_000


def measure(figures: Figures, quick: bool = False) -> None:
    rounds = QUICK_ROUNDS if quick else ROUNDS
    prompts = min(rounds, 2)
    with store("1GiB") as settings:
        with engines(settings) as [writer]:
            for number in range(prompts):
                writer.do("first_token", tokens=PREFIX + TAIL, seed=number)
                writer.do("settle")
        with engines({**settings, "save": False}) as [reader]:
            warm, cold = [], []
            for number in range(-1, rounds):
                seed = number % prompts
                warm_s, found = reader.do("first_token", tokens=PREFIX + TAIL, seed=seed)
                if found != PREFIX:
                    raise RuntimeError(f"{found} of {PREFIX} tokens were found in the store")
                if number < 0:
                    continue  # the first one warms the code
                cold_s, unseen = reader.do(
                    "first_token", tokens=PREFIX + TAIL, seed=COLD_SEED + number
                )
                if unseen:
                    raise RuntimeError(f"{unseen} tokens of an unseen prompt were found")
                warm.append(warm_s)
                cold.append(cold_s)
    figures.add("ttft.dram_vs_cold", ratios(warm, cold))
    figures.add("ttft.dram_s", warm)
    figures.add("ttft.cold_s", cold)
    figures.note(
        "ttft",
        f"SmolLM2-135M in float32 on one thread, {PREFIX} tokens found and {TAIL} computed, "
        "found by another engine than the one that wrote them",
    )
