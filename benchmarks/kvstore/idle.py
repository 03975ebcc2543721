"""Cost of the connector in a step in which it has nothing to do.

Three engines run at once and take turns, one decoding while the others wait: two without a
connector and one with the store, with loading and saving enabled. One request runs, too short to
fill a block, so nothing is loaded or saved. A turn counts with its median step, a round with

    overhead = the store's step / mean of the two plain ones' steps
    noise    = one plain one's step / the other's

`idle.noise` is the method's result for two equal engines.
"""

from __future__ import annotations

import statistics

from benchmarks.kvstore.engines import engines, store
from benchmarks.kvstore.timing import Figures, take_turns

PROMPT, TOKENS = 16, 52
ROUNDS, QUICK_ROUNDS = 10, 3


def measure(figures: Figures, quick: bool = False) -> None:
    with store("256MiB") as settings, engines(None, settings, None) as running:
        names = ("plain", "store", "other")
        arms = {
            name: lambda engine=engine: statistics.median(
                engine.do("decode", prompt=PROMPT, tokens=TOKENS)
            )
            for name, engine in zip(names, running, strict=True)
        }
        taken = take_turns(arms, QUICK_ROUNDS if quick else ROUNDS)
    rounds = list(zip(taken["plain"], taken["store"], taken["other"], strict=True))
    figures.add("idle.step_overhead", [2 * s / (a + b) for a, s, b in rounds])
    figures.add("idle.noise", [b / a for a, _, b in rounds])
    figures.add("idle.plain_step_s", [(a + b) / 2 for a, _, b in rounds])
    figures.note("idle", f"one running request, {TOKENS} tokens a turn, engines in turns")
