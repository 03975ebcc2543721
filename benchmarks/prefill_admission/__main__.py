"""A short prompt that comes while a long one is computed in several steps: when is it answered?

One engine, SmolLM2 on one CPU thread in bfloat16, in this process and stepped by hand, so that both
arms have the same engine. A prompt of 32 tokens comes at five moments of a long one's computation.

    python -m benchmarks.prefill_admission [--quick] [--json FILE]

Arms:
    waits: the short prompt waits for the long one's first token, as with admission without spare
        tokens;
    at_once: it is with the engine at once, which gives a long prompt all tokens of each step, as
        vLLM does;
    beside: likewise, but the engine leaves a sixteenth of each step's tokens
        (`headrace_engine.prefill_admission`).

Figures, by length of the long prompt and tokens of a step, means over the five moments:
    ARM.short_ms, ARM.long_ms: from a prompt's coming to its first token;
    short_vs_waits, long_vs_waits: `beside` divided by `waits` for the same moment, the median.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import time
from pathlib import Path

from benchmarks.speculation.arms import ENVIRONMENT, MODEL

os.environ.update(ENVIRONMENT)

from vllm import LLM, SamplingParams
from vllm.inputs import TokensPrompt

from headrace.model import resolve
from headrace_engine.vllm.engine import SPARE_SHARE

SHORT = 32
CASES = ((3000, 512), (3000, 2048))
"""Tokens of the long prompt and of a step; vLLM's default on a CPU is 2,048."""
MOMENTS = (0.1, 0.3, 0.5, 0.7, 0.9)
"""Shares of the time that the long prompt takes alone."""
MAX_S = 120.0


class Engine:
    """An engine whose limits change between runs."""

    def __init__(self) -> None:
        llm = LLM(
            str(resolve(MODEL)),
            dtype="bfloat16",
            enforce_eager=True,
            max_model_len=8192,
            max_num_batched_tokens=2048,
            max_num_seqs=8,
            enable_prefix_caching=False,
        )
        self._engine = llm.llm_engine
        self._scheduler = self._engine.engine_core.engine_core.scheduler
        self._random, self._number = random.Random(0), 0

    def limit(self, step_tokens: int, *, spare: bool) -> None:
        """So many tokens a step; with `spare`, not all of them for one prompt."""
        self._scheduler.max_num_scheduled_tokens = step_tokens
        most = step_tokens - step_tokens // SPARE_SHARE if spare else 0
        self._scheduler.scheduler_config.long_prefill_token_threshold = most

    def run(self, long: int, moment_s: float, *, waits: bool) -> tuple[float, float]:
        """Return the seconds to the first token of the long prompt and of the short one."""
        began = time.perf_counter()
        first, second = self._add(long), ""
        done: dict[str, float] = {}
        while not second or second not in done or first not in done:
            now_s = time.perf_counter() - began
            if not second and now_s >= moment_s and (not waits or first in done):
                second = self._add(SHORT)
            if not self._engine.has_unfinished_requests():
                time.sleep(0.001)
                continue
            for output in self._engine.step():
                done[output.request_id] = time.perf_counter() - began
            assert now_s < MAX_S
        return done[first], done[second] - moment_s

    def _add(self, tokens: int) -> str:
        self._number += 1
        name, chosen = f"r{self._number}", self._random.choices(range(20, 49_000), k=tokens)
        params = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
        self._engine.add_request(name, TokensPrompt(prompt_token_ids=chosen), params)
        return name


def measure(engine: Engine, long: int, step_tokens: int, rounds: int) -> dict[str, float]:
    """Return the figures of one case, its arms by turns."""
    engine.limit(step_tokens, spare=False)
    alone_s = min(engine.run(long, 0.0, waits=True)[0] for _ in range(2))
    arms = {"waits": (True, False), "at_once": (False, False), "beside": (False, True)}
    seen: dict[str, list[tuple[float, float]]] = {arm: [] for arm in arms}
    for number in range(rounds):
        for moment in MOMENTS:
            for arm in list(arms)[:: 1 if number % 2 else -1]:
                waits, spare = arms[arm]
                engine.limit(step_tokens, spare=spare)
                seen[arm].append(engine.run(long, moment * alone_s, waits=waits))
    figures = {}
    for arm, times in seen.items():
        for which, name in enumerate(("long_ms", "short_ms")):
            figures[f"{arm}.{name}"] = 1e3 * statistics.mean(each[which] for each in times)
    for which, name in enumerate(("long_vs_waits", "short_vs_waits")):
        pairs = zip(seen["beside"], seen["waits"], strict=True)
        figures[name] = statistics.median(ours[which] / theirs[which] for ours, theirs in pairs)
    return {f"{long}/{step_tokens}.{name}": value for name, value in figures.items()}


def main() -> None:
    """Run, print a table, write the JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.prefill_admission")
    parser.add_argument("--quick", action="store_true", help="one round in place of three")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    args = parser.parse_args()
    engine = Engine()
    figures: dict[str, float] = {}
    for long, step_tokens in CASES:
        figures |= measure(engine, long, step_tokens, 1 if args.quick else 3)
    print("| figure | value |\n|---|---:|")
    for name, value in figures.items():
        print(f"| `{name}` | {value:.{2 if 'vs' in name else 0}f} |")
    if args.json:
        args.json.write_text(json.dumps({"figures": figures}, indent=2) + "\n")


if __name__ == "__main__":
    main()
