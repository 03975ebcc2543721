"""Records the steps of one real engine: ``python -m benchmarks.step_time.record FILE.csv``.

SmolLM2 on one CPU thread in bfloat16, in this process. Batches of 1 to 16 rows decode over
contexts of 16 to 2,000 tokens, half of them with draft tokens; prompts of 16 to 4,000 tokens come
in between, alone and beside running rows. One line a step: its shape, and the seconds from handing
it to the worker to having its tokens.
"""

from __future__ import annotations

import argparse
import csv
import os
import random
import time
from pathlib import Path
from typing import Any

from benchmarks.speculation.arms import DRAFT_TOKENS, ENVIRONMENT, MODEL

os.environ.update(ENVIRONMENT)

import numpy as np
from vllm import LLM, SamplingParams
from vllm.inputs import TokensPrompt
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from headrace.model import resolve
from headrace_decode.speculative import proposer
from headrace_decode.speculative.draft_batch import DraftBatch, DraftSource
from headrace_decode.speculative.request_info import REQUEST_KEY
from headrace_decode.speculative.settings import engine_arguments

FIELDS = ("prompt", "prompts", "rows", "draft", "context", "pairs", "seconds")
"""`prompts`: requests whose prompt was computed. `context`: tokens attended to by decoding rows'
tokens; `pairs`: by prompt tokens."""
FIRST_TOKEN, LAST_TOKEN = 20, 49_000
ANSWER_TOKENS = 24
MODEL_TOKENS = 8192
STEP_TOKENS = 2048

steps: list[tuple[float, ...]] = []


class RecordingExecutor(UniProcExecutor):
    """vLLM's executor for one worker, with a stopwatch."""

    _begun_s = 0.0
    _shape: tuple[int, ...] | None = None

    def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Any:
        """Start the clock, then run vLLM's method."""
        self._shape, self._begun_s = shape(scheduler_output), time.perf_counter()
        return super().execute_model(scheduler_output, non_block)

    def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:
        """Run vLLM's method, then record the step."""
        output = super().sample_tokens(grammar_output, non_block)
        if self._shape is not None:
            steps.append((*self._shape, time.perf_counter() - self._begun_s))
        return output


def shape(output: Any) -> tuple[int, ...]:
    """Return all of `FIELDS` except the last."""
    cached = output.scheduled_cached_reqs
    before = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    before |= {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
    new = {request.req_id for request in output.scheduled_new_reqs}
    prompt = prompts = rows = draft = context = pairs = 0
    for name, count in output.num_scheduled_tokens.items():
        attended = count * before[name] + count * (count + 1) // 2
        if name in new or cached.is_context_phase(name):
            prompt, prompts, pairs = prompt + count, prompts + 1, pairs + attended
        else:
            rows, draft, context = rows + 1, draft + count - 1, context + attended
    return prompt, prompts, rows, draft, context, pairs


class Nonsense:
    """A drafter whose drafts mean nothing and have a length of their own in each step."""

    LENGTHS = (0, 1, 2, 4, 8, 16, 3, 6, 12)

    def __init__(self) -> None:
        self._step = 0

    def open_request(self, *_: Any, **__: Any) -> int:
        return 1

    def extend_many(self, *_: Any) -> None: ...

    def draft_many(self, handles: Any, max_tokens: Any) -> DraftBatch:
        """Return the same token for each request in every draft."""
        self._step += 1
        n, length = len(handles), self.LENGTHS[self._step % len(self.LENGTHS)]
        source = np.full(n, int(DraftSource.PROMPT), np.int32)
        lengths = np.full(n, length, np.int32)
        tokens = np.full((n, length), FIRST_TOKEN, np.int32)
        return DraftBatch(tokens, np.ones((n, length), np.float32), lengths, source, source)

    def feedback_many(self, *_: Any) -> None: ...

    def close_request(self, *_: Any, **__: Any) -> None: ...


class Load:
    """The load on the engine."""

    def __init__(self, llm: Any, seed: int) -> None:
        self._engine, self._random, self._number = llm.llm_engine, random.Random(seed), 0

    def turn(self) -> None:
        """Run a batch that decodes, with prompts in between."""
        rng = self._random
        context = int(2 ** rng.uniform(4, 11))
        drafts = rng.random() < 0.5
        for _ in range(rng.choice((1, 1, 2, 3, 4, 6, 8, 12, 16))):
            if context * 16 > 16_000 and rng.random() < 0.6:
                continue
            self._add(context, ANSWER_TOKENS, drafts)
        while self._engine.has_unfinished_requests():
            if rng.random() < 0.05:
                self._add(int(2 ** rng.uniform(4, 12)), 1, False)
            self._engine.step()
        for _ in range(rng.choice((0, 1, 3))):
            self._add(int(2 ** rng.uniform(4, 12)), 1, False)
            if rng.random() < 0.7:
                while self._engine.has_unfinished_requests():
                    self._engine.step()

    def _add(self, tokens: int, answer: int, drafts: bool) -> None:
        self._number += 1
        prompt = [self._random.randrange(FIRST_TOKEN, LAST_TOKEN) for _ in range(tokens)]
        extra = {REQUEST_KEY: {"drafts": drafts}}
        params = SamplingParams(
            max_tokens=answer, temperature=0.0, ignore_eos=True, detokenize=False, extra_args=extra
        )
        self._engine.add_request(f"r{self._number}", TokensPrompt(prompt_token_ids=prompt), params)


def main() -> None:
    parser = argparse.ArgumentParser(description="Records the steps of one engine.")
    parser.add_argument("file", type=Path)
    parser.add_argument("--seconds", type=float, default=240.0)
    args = parser.parse_args()
    proposer.create_memory = lambda settings, config: Nonsense()  # type: ignore[assignment,return-value]
    llm = LLM(
        resolve(MODEL),
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=MODEL_TOKENS,
        max_num_batched_tokens=STEP_TOKENS,
        max_num_seqs=64,
        enable_prefix_caching=False,
        distributed_executor_backend=RecordingExecutor,
        **engine_arguments(DRAFT_TOKENS, mode=f"static:{DRAFT_TOKENS}"),
    )
    load = Load(llm, seed=0)
    load.turn()
    steps.clear()
    end_s = time.perf_counter() + args.seconds
    while time.perf_counter() < end_s:
        load.turn()
    with args.file.open("w", newline="") as file:
        lines = csv.writer(file, lineterminator="\n")
        lines.writerow(FIELDS)
        lines.writerows((*map(int, step[:-1]), f"{step[-1]:.6f}") for step in steps)
    print(f"{len(steps)} steps")


if __name__ == "__main__":
    main()
