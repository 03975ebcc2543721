"""Greedy answers of one vLLM engine to a batch, with drafts of a chosen kind: a truth or a test.

Run as a program, so that the engines leave with their process:
    python -m tests.support.speculating MODEL_FOLDER < task.json > answers.json
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace_decode.speculative.draft_batch import DraftBatch
from headrace_decode.speculative.retrieval.draft_memory import DraftMemory
from tests.support import run
from tests.support.forked import told
from tests.support.program import IN_ONE_PROCESS, say
from tests.support.tiny import VOCABULARY

TOP = 5


@dataclass(frozen=True)
class Greedy:
    """One answer: token ids, and at each place the likeliest tokens' log-probabilities."""

    tokens: list[int]
    tops: list[dict[int, float]] = field(default_factory=list)


@dataclass(frozen=True)
class Run:
    """All answers of one arm, and what the proposer reported at its end (empty without one)."""

    answers: list[Greedy]
    report: dict[str, Any]
    preemptions: int


class KindsOfDrafts(DraftMemory):
    """Drafts of a kind that may be changed while the engine runs.

    "memory": what the memory finds. "junk": random ids, some of them no tokens, all said to be as
    good as certain. "oracle": the true answer, as told. "broken": raises.
    """

    kind = "memory"
    truth: dict[tuple[int, ...], list[int]] = {}

    def __init__(self, *_: Any) -> None:
        """Takes the place of `proposer.create_memory`."""
        super().__init__()
        self._texts: dict[int, tuple[tuple[int, ...], int]] = {}
        self._rng = random.Random(5)

    def open_request(
        self,
        request_id: str,
        prompt_tokens: NDArray[np.int32],
        tenant: str = "",
        *,
        temperature: float = 0.0,
    ) -> int:
        handle = super().open_request(request_id, prompt_tokens, tenant, temperature=temperature)
        self._texts[handle] = tuple(prompt_tokens.tolist()), 0
        return handle

    def extend_many(
        self, handles: Sequence[int], tokens: NDArray[np.int32], counts: NDArray[np.int32]
    ) -> None:
        super().extend_many(handles, tokens, counts)
        for handle, count in zip(handles, counts.tolist(), strict=True):
            prompt, answered = self._texts[handle]
            self._texts[handle] = prompt, answered + count

    def draft_many(self, handles: Sequence[int], max_tokens: int | NDArray[np.int32]) -> DraftBatch:
        if self.kind == "broken":
            raise RuntimeError("a drafter with a bug")
        batch = super().draft_many(handles, max_tokens)
        if self.kind == "memory":
            return batch
        limits = np.broadcast_to(np.asarray(max_tokens, np.int32), (len(handles),)).tolist()
        drafts = [self._draft(handle, limit) for handle, limit in zip(handles, limits, strict=True)]
        width = max(map(len, drafts), default=0)
        tokens = np.zeros((len(drafts), width), np.int32)
        survival = np.zeros((len(drafts), width), np.float32)
        for row, draft in enumerate(drafts):
            tokens[row, : len(draft)] = draft
            survival[row, : len(draft)] = 0.99
        lengths = np.array([len(draft) for draft in drafts], np.int32)
        return DraftBatch(tokens, survival, lengths, batch.source, batch.match_tokens)

    def feedback_many(
        self, batch: DraftBatch, offered_k: NDArray[np.int32], accepted_k: NDArray[np.int32]
    ) -> None:
        if batch.handles is not None:
            super().feedback_many(batch, offered_k, accepted_k)

    def _draft(self, handle: int, max_tokens: int) -> list[int]:
        if self.kind == "junk":
            return [self._rng.randrange(-2, 3 * VOCABULARY) for _ in range(max_tokens)]
        prompt, answered = self._texts[handle]
        return self.truth.get(prompt, [])[answered : answered + max_tokens]


def speculating_runs(
    model: str,
    prompts: list[list[int]],
    max_tokens: list[int],
    arms: list[dict[str, Any]],
    *,
    timeout_s: float = 800.0,
) -> list[Run]:
    """The prompts' answers in each arm. Arms with equal engines that follow each other share one.

    Args:
        max_tokens: of each prompt.
        arms: each with `draft_tokens` (0 for an engine without drafting), `blocks` (KV blocks, None
            for plenty), `kind` (of drafts) and `mode` (of the planner).

    Raises:
        RuntimeError: the engine failed; with the end of its log.
    """
    task = {"prompts": prompts, "max_tokens": max_tokens, "arms": arms}
    runs = told("speculating", model, task, timeout_s=timeout_s, **IN_ONE_PROCESS)
    return [
        Run(
            [
                Greedy(a["tokens"], [{int(t): p for t, p in top.items()} for top in a["tops"]])
                for a in each["answers"]
            ],
            each["report"],
            each["preemptions"],
        )
        for each in runs
    ]


def _engine(model: str, draft_tokens: int, blocks: int | None) -> Any:
    from vllm import LLM

    from headrace_decode.speculative import proposer
    from headrace_decode.speculative.settings import engine_arguments

    run.engine_started()
    speculation = {}
    if draft_tokens:
        proposer.create_memory = KindsOfDrafts
        speculation = engine_arguments(draft_tokens)
    return LLM(
        model,
        dtype="float32",
        enforce_eager=True,
        max_model_len=1024,
        max_num_seqs=64,
        num_gpu_blocks_override=blocks,
        disable_log_stats=False,
        **speculation,
    )


def _params(number: int, max_tokens: int) -> Any:
    """Greedy; every eighth request has two samples, and every eighth keeps to a grammar."""
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    common = {"max_tokens": max_tokens, "ignore_eos": True, "logprobs": TOP}
    if number % 8 == 1:  # vLLM refuses n > 1 at temperature 0; the likeliest of one is greedy, too
        return SamplingParams(n=2, temperature=1.0, top_k=1, **common)
    if number % 8 == 5:
        grammar = StructuredOutputsParams(regex="( [a-z]{1,8}){60}")
        return SamplingParams(temperature=0.0, structured_outputs=grammar, **common)
    return SamplingParams(temperature=0.0, **common)


def _run(llm: Any, task: dict[str, Any], arm: dict[str, Any]) -> dict[str, Any]:
    from vllm.inputs import TokensPrompt

    report: dict[str, Any] = {}
    if arm["draft_tokens"]:
        KindsOfDrafts.kind = arm["kind"]
        llm.collective_rpc("headrace_command", args=("speculation", {"mode": arm["mode"]}))
    before = _preemptions(llm)
    results = llm.generate(
        [TokensPrompt(prompt_token_ids=prompt) for prompt in task["prompts"]],
        [_params(number, count) for number, count in enumerate(task["max_tokens"])],
        use_tqdm=False,
    )
    if arm["draft_tokens"]:
        [report] = llm.collective_rpc("headrace_command", args=("speculation", {}))
    answers = [
        {
            "tokens": list(result.outputs[-1].token_ids),
            "tops": [
                {token: entry.logprob for token, entry in step.items()}
                for step in result.outputs[-1].logprobs
            ],
        }
        for result in results
    ]
    return {"answers": answers, "report": report, "preemptions": _preemptions(llm) - before}


def _preemptions(llm: Any) -> int:
    return sum(int(m.value) for m in llm.get_metrics() if m.name == "vllm:num_preemptions")


def _main(model: str, task: dict[str, Any]) -> list[dict[str, Any]]:
    runs: list[dict[str, Any]] = []
    llm, key = None, None
    for arm in task["arms"]:
        wanted = (arm["draft_tokens"], arm["blocks"])
        if key != wanted:
            KindsOfDrafts.kind = "memory"
            if llm is not None:
                llm.llm_engine.engine_core.shutdown()
            llm, key = _engine(model, *wanted), wanted
        runs.append(_run(llm, task, arm))
        for prompt, answer in zip(task["prompts"], runs[0]["answers"], strict=True):
            KindsOfDrafts.truth[tuple(prompt)] = answer["tokens"]
    assert llm is not None
    llm.llm_engine.engine_core.shutdown()
    return runs


if __name__ == "__main__":
    say(_main(sys.argv[1], json.load(sys.stdin)))
