"""Cost of saving for a running decode: its inter-token latencies while others' blocks are saved.

One request decodes. Every 16 tokens another request with 512 new tokens arrives and is computed in
one step with it; its four blocks (24 MB) are saved during the next steps. Saving is switched on and
off from one such cycle to the next, in one engine, so both have the same machine conditions.

`save.itl_p99_vs_off` is over all gaps between the running request's tokens, those that contain a
prefill included. Since those are the longest, `save.step_p99_vs_off` and `save.step_p50_vs_off`
are over the other gaps only, in which the saves happen.
"""

from __future__ import annotations

from benchmarks.figures import quantile
from benchmarks.kvstore.engines import engines, store
from benchmarks.kvstore.timing import Figures

CYCLES, QUICK_CYCLES = 80, 16
GAPS, PROMPT = 16, 512


def measure(figures: Figures, quick: bool = False) -> None:
    with store("1GiB") as settings, engines(settings) as [engine]:
        cycles = QUICK_CYCLES if quick else CYCLES
        found = engine.do("itl", cycles=cycles, gaps=GAPS, prompt=PROMPT, seed=1_000_000)
    every = {arm: [gap for cycle in found[arm] for gap in cycle] for arm in found}
    steps = {arm: decode_steps(found[arm]) for arm in found}
    for name, gaps, q in (
        ("itl_p99", every, 0.99),
        ("step_p99", steps, 0.99),
        ("step_p50", steps, 0.5),
    ):
        on_s, off_s = quantile(gaps["on"], q), quantile(gaps["off"], q)
        figures.add(f"save.{name}_vs_off", on_s / off_s)
        figures.add(f"save.{name}_s", on_s)
    figures.note(
        "itl",
        f"{len(every['on'])} gaps with saving and {len(every['off'])} without, {cycles // 2} "
        f"cycles each, {PROMPT} new tokens a cycle",
    )


def decode_steps(cycles: list[list[float]]) -> list[float]:
    """Return the gaps without a prefill: of each cycle all but the longest."""
    return [gap for cycle in cycles for gap in sorted(cycle)[:-1]]
