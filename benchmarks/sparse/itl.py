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

import argparse
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

PROMPT, ANSWER = 7900, 96
SHARES = (0.05, 0.1, 0.2)
TURNS = 3
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}


class Engine:
    """SmolLM2, with sparse attention for those that ask."""

    def __init__(self) -> None:
        from vllm import LLM

        from headrace.model import resolve
        from headrace_decode.sparse.engine.bound import BOUND
        from headrace_decode.sparse.engine.settings import SparseSettings

        self._llm: Any = LLM(
            str(resolve(None)),
            dtype="bfloat16",
            enforce_eager=True,
            max_model_len=8192,
            additional_config=SparseSettings().additional_config(),
            worker_cls="headrace_decode.sparse.engine.worker.SparseTakingUpWorker",
        )
        self._bound, self._name = BOUND, 0

    def prompt(self) -> list[int]:
        """Documents of installed packages."""
        from headrace_prefill.reuse.offline.prompts import documents

        tokenizer = self._llm.get_tokenizer()
        ids: list[int] = []
        for file in documents(True):
            ids += tokenizer(file.read_text("utf-8", errors="replace")).input_ids
            if len(ids) > PROMPT:
                break
        return ids[:PROMPT]

    def answer(
        self, prompt: list[int], share: float | None
    ) -> tuple[list[int], list[tuple[float, bool]]]:
        """An answer's tokens, and the seconds of each but the first, with whether it was sparse."""
        from vllm import SamplingParams

        salt = {} if share is None else {"cache_salt": f"technique:sparse-{share}:"}
        params = SamplingParams(
            max_tokens=ANSWER,
            temperature=0.0,
            ignore_eos=True,
            extra_args=None if share is None else {"sparse": share},
        )
        engine, self._name = self._llm.llm_engine, self._name + 1
        engine.add_request(str(self._name), {"prompt_token_ids": prompt, **salt}, params)
        tokens: list[int] = []
        times = []
        while engine.has_unfinished_requests():
            begun, rows = time.perf_counter(), self._bound.found
            outputs = engine.step()
            took = time.perf_counter() - begun
            for output in outputs:
                if tokens:
                    times.append((took, self._bound.found > rows))
                tokens = list(output.outputs[0].token_ids)
        return tokens, times


def measured() -> dict[str, float]:
    """The figures."""
    engine = Engine()
    prompt = engine.prompt()
    exact, _ = engine.answer(prompt, None)
    making: list[float] = []
    figures: dict[str, float] = {}
    for share in SHARES:
        tokens, times = engine.answer(prompt, share)
        if not making:
            making = [seconds for seconds, sparse in times if not sparse]
        if share == 0.1:
            pairs = zip(exact, tokens, strict=True)
            same = next((n for n, (a, b) in enumerate(pairs) if a != b), ANSWER)
            figures["itl.same_first_tokens"] = float(same)
    found: dict[float | None, list[float]] = {None: [], **{share: [] for share in SHARES}}
    for _ in range(TURNS):
        for way, into in found.items():
            _, times = engine.answer(prompt, way)
            into += [seconds for seconds, sparse in times if sparse == (way is not None)]
    base = statistics.median(found[None])
    figures["itl.exact_ms"] = base * 1e3
    for share in SHARES:
        figures[f"itl.sparse_vs_exact.{share}"] = statistics.median(found[share]) / base
    figures["itl.making_steps"] = float(len(making))
    if making:
        figures["itl.making_vs_exact"] = statistics.median(making) / base
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, required=True, metavar="FILE")
    options = parser.parse_args()
    os.environ.update(ENVIRONMENT)
    found = {"figures": {name: round(value, 4) for name, value in measured().items()}}
    options.json.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
