"""An engine that decodes a workload at some concurrency for a while and counts: an arm's slice.

Driven by JSON lines (`benchmarks.kvstore.child`). Requests go on from slice to slice, so that arms
which take turns on one engine find the same mixture of contexts. Steps that compute prompts do not
count: what is compared is decoding.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from typing import Any

from benchmarks.kvstore.child import serve
from benchmarks.speculation.workloads import Workload

ANSWER_TOKENS = 96
MODEL_TOKENS = 1024


class Node:
    """One engine, in this process."""

    def __init__(self, model: str, engine: dict[str, Any]) -> None:
        from transformers import AutoTokenizer
        from vllm import LLM

        tokenizer = AutoTokenizer.from_pretrained(model)

        def encode(text: str) -> list[int]:
            return list(tokenizer(text, add_special_tokens=False)["input_ids"])

        self._llm = LLM(
            model, max_model_len=MODEL_TOKENS, max_num_seqs=64, enforce_eager=True, **engine
        )
        self._engine = self._llm.llm_engine
        self._workloads = {name: Workload(name, encode) for name in ("draftable", "undraftable")}
        self._cell: tuple[str, int] | None = None
        self._running: set[str] = set()
        self._number = 0
        self._rng = random.Random(0)

    def mode(self, mode: str) -> dict[str, Any]:
        """Switch the planner; the proposer's report."""
        [report] = self._llm.collective_rpc("headrace_speculation", args=({"mode": mode},))
        return dict(report)

    def cell(self, workload: str, concurrency: int) -> None:
        """From now on so many requests of this workload run."""
        self._engine.abort_request(list(self._running), internal=False)
        self._running.clear()
        while self._engine.has_unfinished_requests():
            self._engine.step()
        self._cell = workload, concurrency
        self._fill(stagger=True)

    def slice(self, seconds: float, steps: int) -> dict[str, float]:
        """Decode for so long, and for so many steps at least; what that brought."""
        tokens, spent, taken = 0, 0.0, 0
        self._fill()
        self._step()  # it still verifies what the arm before has drafted
        while spent < seconds or taken < steps:
            self._fill()
            began = time.perf_counter()
            emitted = self._step()
            spent += time.perf_counter() - began
            tokens += emitted
            taken += 1
        return {"tokens": tokens, "seconds": spent, "steps": taken}

    def close(self) -> None:
        self._engine.engine_core.shutdown()

    def _fill(self, stagger: bool = False) -> None:
        """Start requests until enough run, and compute their prompts."""
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt
        from vllm.sampling_params import RequestOutputKind

        assert self._cell is not None
        workload, concurrency = self._workloads[self._cell[0]], self._cell[1]
        new = set()
        while len(self._running) < concurrency:
            self._number += 1
            request_id = f"{self._cell[0]}-{self._number}"
            share = self._rng.uniform(0.2, 1.0) if stagger else 1.0
            params = SamplingParams(
                max_tokens=int(share * ANSWER_TOKENS),
                temperature=workload.temperature,
                ignore_eos=True,
                seed=self._number if workload.temperature else None,
                detokenize=False,
                output_kind=RequestOutputKind.DELTA,
            )
            prompt = workload.prompt()[: MODEL_TOKENS - ANSWER_TOKENS - 1]
            self._engine.add_request(request_id, TokensPrompt(prompt_token_ids=prompt), params)
            self._running.add(request_id)
            new.add(request_id)
        while new & self._running and new:
            self._step(new)

    def _step(self, awaited: set[str] | None = None) -> int:
        emitted = 0
        for output in self._engine.step():
            count = len(output.outputs[0].token_ids)
            emitted += count
            if awaited is not None and count:
                awaited.discard(output.request_id)
            if output.finished:
                self._running.discard(output.request_id)
        return emitted


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--engine", type=json.loads, required=True)
    args = parser.parse_args()
    serve(lambda: Node(args.model, args.engine))


if __name__ == "__main__":
    main()
