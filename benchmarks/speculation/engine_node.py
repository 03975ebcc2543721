"""An engine that answers requests of a workload at a given concurrency, and counts: an arm's turn.

It is driven by JSON lines (`benchmarks.kvstore.child`). Every arm gets the same requests in one
order, none twice, and is a separate tenant: its drafts come from its own past answers only, as if
it had the engine for itself. Steps that compute prompts do not count, since decoding is compared.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from typing import Any

from benchmarks.kvstore.child import serve
from benchmarks.speculation.workloads import Workload
from headrace_decode.speculative.request_info import REQUEST_KEY

ANSWER_TOKENS = 64
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
        self._running: set[str] = set()
        self._number = 0
        self._asked: Counter[tuple[str, str, int]] = Counter()

    def mode(self, mode: str) -> dict[str, Any]:
        """Switch the planner; the proposer's report."""
        [report] = self._llm.collective_rpc(
            "headrace_command", args=("speculation", {"mode": mode})
        )
        return dict(report)

    def turn(
        self, arm: str, workload: str, concurrency: int, requests: int, first: int, steps_max: int
    ) -> dict[str, float]:
        """Answer so many requests, so many at once, and count while that many run.

        Args:
            arm: whose turn it is.
            first: document of the first request; those of the others follow.
            steps_max: end after so many steps.
        """
        tokens, spent, taken, begun = 0, 0.0, 0, 0
        while taken < steps_max:
            new = min(concurrency - len(self._running), requests - begun)
            self._start(arm, workload, range(first + begun, first + begun + new))
            begun += new
            if len(self._running) < concurrency:
                if begun == requests:
                    break
                continue
            began = time.perf_counter()
            tokens += self._step()
            spent += time.perf_counter() - began
            taken += 1
        self._engine.abort_request(list(self._running), internal=False)
        self._running.clear()
        while self._engine.has_unfinished_requests():
            self._engine.step()
        return {"tokens": tokens, "seconds": spent, "steps": taken}

    def close(self) -> None:
        self._engine.engine_core.shutdown()

    def _start(self, arm: str, name: str, documents: range) -> None:
        """Start a request about each, and compute their prompts."""
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt
        from vllm.sampling_params import RequestOutputKind

        workload = self._workloads[name]
        new = set()
        for document in documents:
            self._number += 1
            request_id = f"{name}-{self._number}"
            params = SamplingParams(
                max_tokens=ANSWER_TOKENS,
                temperature=workload.temperature,
                ignore_eos=True,
                extra_args={REQUEST_KEY: {"tenant": arm}},
                detokenize=False,
                output_kind=RequestOutputKind.DELTA,
            )
            asked = (arm, name, document % len(workload.documents))
            prompt = workload.prompt(document, self._asked[asked])
            self._asked[asked] += 1
            prompt = prompt[: MODEL_TOKENS - ANSWER_TOKENS - 1]
            self._engine.add_request(request_id, TokensPrompt(prompt_token_ids=prompt), params)
            self._running.add(request_id)
            new.add(request_id)
        while new & self._running:
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
