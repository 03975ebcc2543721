"""Seconds between an answer's tokens with offload over those with all KV in the cache, at 8k.

    python -m benchmarks.sparse.offload --json FILE

SmolLM2 in bfloat16 on one thread, one engine in this process, one request at a time, 10 % of the
units. Requests of both ways take turns over the same prompt, whose KV is computed once and then
cached; both attend to the same units. Steps in which summaries are made are left out.

    itl_with_offload_vs_all_in_memory   medians
    itl.in_memory_ms                    of the latter
    hit_rate                            chosen units that were in the cache already, of those whose
                                        KV had left it
    blocks_vs_all_in_memory             of the cache that an answer holds
    same_tokens                         of the two answers, before the first that differs
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

from benchmarks.sparse.itl import ENVIRONMENT, PROMPT

ANSWER, TURNS, SHARE = 64, 2, 0.1


class Engine:
    """SmolLM2, whose cache holds the prompt twice."""

    def __init__(self) -> None:
        from vllm import LLM

        from headrace.model import resolve
        from headrace_decode.replay.llm import OFFLOADING_SCHEDULERS
        from headrace_decode.sparse.engine.bound import BOUND
        from headrace_decode.sparse.engine.settings import SparseSettings

        self._llm: Any = LLM(
            str(resolve(None)),
            dtype="bfloat16",
            enforce_eager=True,
            max_model_len=8192,
            num_gpu_blocks_override=130,
            async_scheduling=False,
            additional_config=SparseSettings(offload_gib=0.5).additional_config(),
            worker_cls="headrace_decode.sparse.engine.worker.SparseTakingUpWorker",
            scheduler_cls=OFFLOADING_SCHEDULERS[False],
        )
        assert BOUND.offloading is not None
        self._bound, self.offloading, self._name = BOUND, BOUND.offloading, 0
        self._scheduler = self._llm.llm_engine.engine_core.engine_core.scheduler
        self._scheduler._switch = lambda manager: None  # each turn has its way

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

    def answer(self, prompt: list[int], offload: bool) -> tuple[list[int], list[float], int]:
        """An answer's tokens, seconds of those whose steps were sparse, blocks that it holds."""
        from vllm import SamplingParams

        params = SamplingParams(
            max_tokens=ANSWER, temperature=0.0, ignore_eos=True, extra_args={"sparse": SHARE}
        )
        engine, self._name = self._llm.llm_engine, self._name + 1
        engine.add_request(str(self._name), {"prompt_token_ids": prompt}, params)
        scheduler, manager = self._scheduler, self._scheduler._offloads
        if offload:
            [request] = list(scheduler.waiting)
            manager.ledger.plan(request.request_id, scheduler._smallest(request))
        tokens: list[int] = []
        times, held = [], 0
        while engine.has_unfinished_requests():
            before = self._sparse_rows()
            begun = time.perf_counter()
            outputs = engine.step()
            took = time.perf_counter() - begun
            if self._sparse_rows() > before:
                times.append(took)
                if engine.has_unfinished_requests():
                    pool = manager.block_pool
                    held = pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()
            for output in outputs:
                tokens = list(output.outputs[0].token_ids)
        return tokens, times, held

    def _sparse_rows(self) -> int:
        return int(self._bound.found + self.offloading.sparse)

    def hits(self) -> float:
        """Of all requests that ended, as far as the worker knows."""
        return 1 - self.offloading.fetched / max(self.offloading.asked, 1)


def measured() -> dict[str, float]:
    """The figures."""
    engine = Engine()
    prompt = engine.prompt()
    times: dict[bool, list[float]] = {False: [], True: []}
    blocks, answers = {}, {}
    for _ in range(TURNS):
        for offload in (False, True):
            answers[offload], some, blocks[offload] = engine.answer(prompt, offload)
            times[offload] += some
    engine.answer(prompt[:64], False)  # the worker learns that the last one ended
    memory = statistics.median(times[False])
    pairs = zip(answers[False], answers[True], strict=True)
    return {
        "itl_with_offload_vs_all_in_memory": statistics.median(times[True]) / memory,
        "itl.in_memory_ms": memory * 1e3,
        "hit_rate": engine.hits(),
        "blocks_vs_all_in_memory": blocks[True] / blocks[False],
        "same_tokens": float(next((n for n, (a, b) in enumerate(pairs) if a != b), ANSWER)),
    }


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
