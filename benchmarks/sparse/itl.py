"""Seconds between an answer's tokens in a whole vLLM engine, sparse over exact, at 8k.

    python -m benchmarks.sparse.itl --json FILE

SmolLM2 in bfloat16 on one thread, one engine in this process, one request at a time. Exact and
sparse requests take turns over the same prompt; each way's KV is prefilled once and then cached.
Steps in which a request's summaries are made count by themselves.

    itl.sparse_vs_exact.SHARE     medians, when all summaries are there
    itl.exact_ms                  of an exact request
    itl.making_vs_exact           of the steps that make summaries
    itl.making_steps              how many these are, if nothing of the prompt is known
    itl.same_first_tokens         of the answer, before the first that differs at 10 %
"""

from __future__ import annotations

import statistics

from benchmarks.sparse.serving import Engine, report, same_first
from headrace_decode.attention.settings import SparseSettings

PROMPT, ANSWER = 7900, 96
SHARES = (0.05, 0.1, 0.2)
TURNS = 3


def answered(
    engine: Engine, prompt: list[int], share: float | None
) -> tuple[list[int], list[tuple[float, bool]]]:
    """An answer's tokens, and the seconds of each but the first, with whether it was sparse."""
    salt = "" if share is None else f"technique:sparse-{share}:"
    name = engine.add(prompt, ANSWER, share, salt)
    tokens: list[int] = []
    times = []
    for step in engine.steps():
        if tokens:
            times.append((step.seconds, step.sparse > 0))
        if name in step.outputs:
            tokens += step.outputs[name].token_ids
    return tokens, times


def measured() -> dict[str, float]:
    """Return the figures."""
    engine = Engine(SparseSettings())
    [prompt] = engine.prompts(PROMPT)
    exact, _ = answered(engine, prompt, None)
    making: list[float] = []
    figures: dict[str, float] = {}
    for share in SHARES:
        tokens, times = answered(engine, prompt, share)
        if not making:
            making = [seconds for seconds, sparse in times if not sparse]
        if share == 0.1:
            figures["itl.same_first_tokens"] = float(same_first(exact, tokens))
    found: dict[float | None, list[float]] = {None: [], **{share: [] for share in SHARES}}
    for _ in range(TURNS):
        for way, into in found.items():
            _, times = answered(engine, prompt, way)
            into += [seconds for seconds, sparse in times if sparse == (way is not None)]
    base = statistics.median(found[None])
    figures["itl.exact_ms"] = base * 1e3
    for share in SHARES:
        figures[f"itl.sparse_vs_exact.{share}"] = statistics.median(found[share]) / base
    figures["itl.making_steps"] = float(len(making))
    if making:
        figures["itl.making_vs_exact"] = statistics.median(making) / base
    return figures


if __name__ == "__main__":
    report(__doc__, measured)
