"""Cost of a new engine's first requests: ``python -m benchmarks.speculation.cold --answers F``.

A drafter that has learned nothing drafts too little or too much. A real engine shows this only once
after each start, in real time. Here the model's answers are instead replayed through the memory,
the planner and the session, as an engine would call them, one request at a time. Each step takes
the time that `seconds` returns. A draft token is accepted if it equals the answer: an engine does
the same for greedy answers, and for sampled ones the distribution is the same.

Every arm begins with nothing learned and answers the same 12 draftable requests, then the same 12
undraftable ones (`workloads`). F holds the answers; the first run writes it (five minutes).

- ``W.steps``: of ``auto``; ``draftable.first_steps``: of its first six requests
- ``W.tok_s_vs_none``, ``W.tok_s_vs_best_static_k``: as in `benchmarks.speculation`
- ``even.*``: with every token at even odds before anything is learned
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.speculation.arms import MODEL
from benchmarks.speculation.engine_node import ANSWER_TOKENS, MODEL_TOKENS
from benchmarks.speculation.workloads import DOCUMENTS, Workload
from headrace_decode.speculative.planning.draft_planner import DraftMode, DraftPlanner
from headrace_decode.speculative.request_info import RequestInfo
from headrace_decode.speculative.retrieval.draft_memory import DraftMemory
from headrace_decode.speculative.session import BatchRows, SpeculationSession

Answers = dict[str, list[tuple[list[int], list[int]]]]
"""Workload -> prompt and answer of each request, as token ids."""
TEMPERATURE = {"draftable": 0.0, "undraftable": 1.0}
ARMS = ("off", "auto", "static:2", "static:4", "static:8", "static:16")
DRAFT_TOKENS, NOISE = 16, 0.03


def seconds(tokens: int, drafted: int) -> float:
    """Return the seconds of a step that computes `tokens` tokens: SmolLM2-135M with one thread,
    verification included."""
    return 0.0218 + 0.00075 * tokens + 0.0005 * (drafted > 0)


def record() -> Answers:
    """Return the model's answers."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from headrace.model import resolve

    path = resolve(MODEL)
    found: Answers = {}
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    torch.manual_seed(0)
    for name, temperature in TEMPERATURE.items():
        workload = Workload(
            name, lambda text: list(tokenizer(text, add_special_tokens=False).input_ids)
        )
        drawn = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {}
        found[name] = []
        for document in range(DOCUMENTS):
            prompt = workload.prompt(document, 0)[: MODEL_TOKENS - ANSWER_TOKENS - 1]
            with torch.inference_mode():
                whole = model.generate(
                    torch.tensor([prompt]), max_new_tokens=ANSWER_TOKENS, eos_token_id=None, **drawn
                )
            found[name].append((prompt, whole[0, len(prompt) :].tolist()))
    return found


class Engine:
    """One arm: everything that drafts, new, and a clock."""

    def __init__(self, mode: str, *, even: bool = False, seed: int = 0) -> None:
        self.planner, self.memory = DraftPlanner(seed=seed), DraftMemory()
        self.planner.mode = DraftMode.parse(mode)
        if even:
            self.memory.acceptance.parameters.weights[:, 0] = 0.0
            self.memory.acceptance.update_votes()
        self.session = SpeculationSession(
            self.memory,
            self.planner,
            draft_tokens=DRAFT_TOKENS,
            model_tokens=MODEL_TOKENS,
            step_tokens=MODEL_TOKENS,
            vocabulary=1 << 30,
        )
        self._noise, self._now_s, self._ended = np.random.default_rng(seed), 0.0, list[str]()
        self.decode_s = 0.0
        """Spent on steps that computed no prompt."""

    def answer(self, name: str, prompt: list[int], answer: list[int], temperature: float) -> int:
        """Answer one request; the steps that its decoding took."""
        whole: NDArray[np.int32] = np.array([prompt + answer], np.int32)
        facts = RequestInfo(len(prompt), "one", max_tokens=len(answer), temperature=temperature)
        at, steps, draft = len(prompt), 0, list[int]()
        while True:
            tokens = 1 + len(draft) if steps else len(prompt)
            self.session.begin(tokens, len(draft), [name], self._ended, self._now_s)
            self._ended = []
            right = 0
            while right < len(draft) and draft[right] == whole[0, at + right]:
                right += 1
            emitted = whole[0, at : at + right + 1].tolist()
            at += len(emitted)
            took_s = seconds(tokens, len(draft)) * float(self._noise.lognormal(0.0, NOISE))
            self._now_s += took_s
            self.decode_s += took_s * (steps > 0)
            rows = BatchRows([name], [emitted], np.array([at]), whole)
            [draft] = self.session.propose(rows, lambda _: facts)
            if at == whole.shape[1]:
                self._ended = [name]
                return steps
            steps += 1


def measure(answers: Answers, seeds: int) -> dict[str, float]:
    """Return the figures, means over the seeds of noise and of control steps."""
    found: dict[str, float] = {}
    for even in (False, True):
        runs = [_run(answers, even, seed) for seed in range(seeds)]
        for key in runs[0]:
            found["even." * even + key] = float(np.mean([run[key] for run in runs]))
    return found


def _run(answers: Answers, even: bool, seed: int) -> dict[str, float]:
    spent: dict[str, dict[str, float]] = {name: {} for name in answers}
    found: dict[str, float] = {}
    for arm in ARMS:
        engine = Engine(arm, even=even, seed=seed)
        for name, requests in answers.items():
            began_s = engine.decode_s
            steps = [
                engine.answer(f"{name}{number}", *request, TEMPERATURE[name])
                for number, request in enumerate(requests)
            ]
            spent[name][arm] = engine.decode_s - began_s
            if arm == "auto":
                found[f"{name}.steps"] = sum(steps)
                found[f"{name}.first_steps"] = sum(steps[: DOCUMENTS // 2])
    for name, took in spent.items():
        best = min(took_s for arm, took_s in took.items() if arm != "auto")
        found[f"{name}.tok_s_vs_none"] = took["off"] / took["auto"]
        found[f"{name}.tok_s_vs_best_static_k"] = best / took["auto"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="What a new engine's first requests cost.")
    parser.add_argument("--answers", type=Path, required=True, help="recorded here, or read")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    args = parser.parse_args()
    if not args.answers.exists():
        args.answers.write_text(json.dumps(record()))
    found = measure(json.loads(args.answers.read_text()), args.seeds)
    for name, value in found.items():
        print(f"{name:40} {value:10.3f}")
    if args.json is not None:
        args.json.write_text(json.dumps({"figures": found}, indent=2) + "\n")


if __name__ == "__main__":
    main()
