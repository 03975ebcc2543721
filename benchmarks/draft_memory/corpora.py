"""Exchanges to replay: prompts and answers from data that Python packages ship, tokenised.

- ``code``: modules of the standard library; the first third is the prompt, the rest the answer.
- ``agent``: function calls of the Berkeley Function Calling Leaderboard (package ``bfcl-eval``,
  Apache-2.0): functions and question are the prompt, the reference calls the answer.
- ``prose``: the language reference that ``pydoc`` ships and the long descriptions of the installed
  packages, cut as code is.

The order is shuffled with a fixed seed, so that past answers are of all kinds.
"""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import json
import random
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

ANSWER_TOKENS = 768
PROMPT_TOKENS = 4096
_CALL_KINDS = (
    "simple_python",
    "multiple",
    "parallel",
    "live_simple",
    "live_multiple",
    "live_parallel",
)


@dataclass(frozen=True)
class Exchange:
    """One request: `prompt` and `answer`, int32 tokens."""

    prompt: NDArray[np.int32]
    answer: NDArray[np.int32]


Encode = Callable[[str], list[int]]


def tokenizer(path: Path) -> Encode:
    """Return the encoder of a ``tokenizer.json``."""
    from tokenizers import Tokenizer

    whole = Tokenizer.from_file(str(path))
    return lambda text: list(whole.encode(text, add_special_tokens=False).ids)


def load(name: str, encode: Encode, exchanges: int, seed: int = 0) -> list[Exchange]:
    """So many exchanges of a corpus, or as many as it has."""
    texts = list({"code": _code, "agent": _agent, "prose": _prose}[name]())
    random.Random(seed).shuffle(texts)
    found: list[Exchange] = []
    for prompt, answer in texts:
        if len(found) == exchanges:
            break
        ids = [np.array(encode(part), np.int32) for part in (prompt, answer)]
        if len(ids[1]) >= 8:
            found.append(Exchange(ids[0][-PROMPT_TOKENS:], ids[1][:ANSWER_TOKENS]))
    return found


def library(encode: Encode, tokens: int, seed: int = 0) -> list[NDArray[np.int32]]:
    """About so many tokens of the standard library, in pieces as long as an answer."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    files += sorted((Path(sysconfig.get_path("stdlib")) / "test").glob("*.py"))
    random.Random(seed).shuffle(files)
    found: list[NDArray[np.int32]] = []
    for file in files:
        ids = np.array(encode(file.read_text(errors="replace")), np.int32)
        whole = len(ids) // ANSWER_TOKENS * ANSWER_TOKENS
        found += list(ids[:whole].reshape(-1, ANSWER_TOKENS))
        if len(found) * ANSWER_TOKENS >= tokens:
            break
    return found


def _chat(user: str) -> str:
    return f"<|im_start|>user\n{user}<|im_end|>\n<|im_start|>assistant\n"


def _cut(text: str) -> tuple[str, str]:
    """Return a text's first third as the prompt of the rest, cut at a line's end."""
    at = text.rfind("\n", 0, len(text) // 3) + 1
    return _chat("Go on.\n" + text[:at][-8000:]), text[at : at + 6000]


def _code() -> Iterator[tuple[str, str]]:
    root = Path(sysconfig.get_path("stdlib"))
    for folder in (".", "asyncio", "email", "http", "json", "logging", "multiprocessing", "test"):
        for file in sorted((root / folder).glob("*.py")):
            text = file.read_text(errors="replace")
            if len(text) > 3000:
                yield _cut(text)


def _prose() -> Iterator[tuple[str, str]]:
    from pydoc_data.topics import topics

    texts = dict(topics)
    for package in importlib.metadata.distributions():
        body = package.metadata.get_payload()  # type: ignore[attr-defined]
        texts[str(package.metadata["Name"])] = body if isinstance(body, str) else ""
    for name in sorted(texts):
        if len(texts[name]) > 3000:
            yield _cut(texts[name])


def _agent() -> Iterator[tuple[str, str]]:
    spec = importlib.util.find_spec("bfcl_eval")
    if spec is None or spec.origin is None:
        raise SystemExit("the agent corpus needs the package bfcl-eval on the path")
    data = Path(spec.origin).parent / "data"
    for kind in _CALL_KINDS:
        answers = {row["id"]: row for row in _rows(data / f"possible_answer/BFCL_v4_{kind}.json")}
        for row in _rows(data / f"BFCL_v4_{kind}.json"):
            if row["id"] in answers:
                said = "\n".join(turn["content"] for turn in row["question"][0])
                tools = "\n".join(json.dumps(tool) for tool in row["function"])
                calls = answers[row["id"]]["ground_truth"]
                yield _chat(f"{tools}\n\n{said}"), "".join(map(_call, calls)) + "<|im_end|>"
    documents = {
        file.stem: file.read_text()
        for file in sorted((data / "multi_turn_func_doc").glob("*.json"))
    }
    answers = {
        row["id"]: row for row in _rows(data / "possible_answer/BFCL_v4_multi_turn_base.json")
    }
    for row in _rows(data / "BFCL_v4_multi_turn_base.json"):
        tools = "".join(documents[_DOCUMENTS[name]] for name in row["involved_classes"])
        talk = f"<|im_start|>system\n{tools}<|im_end|>\n"
        for turns, calls in zip(row["question"], answers[row["id"]]["ground_truth"], strict=True):
            talk += _chat("\n".join(turn["content"] for turn in turns))
            answer = "".join(map(_python_call, calls)) + "<|im_end|>"
            yield talk, answer
            talk += answer + "\n"


_DOCUMENTS = {
    "GorillaFileSystem": "gorilla_file_system",
    "MathAPI": "math_api",
    "MessageAPI": "message_api",
    "TwitterAPI": "posting_api",
    "TicketAPI": "ticket_api",
    "TradingBot": "trading_bot",
    "TravelAPI": "travel_booking",
    "VehicleControlAPI": "vehicle_control",
}


def _rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines() if line.strip()]


def _tool_call(name: str, arguments: dict[str, Any]) -> str:
    text = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{text}\n</tool_call>\n"


def _call(truth: dict[str, dict[str, list[Any]]]) -> str:
    """One call of the reference: for each argument the first of the values that count as right."""
    ((name, arguments),) = truth.items()
    given = {key: _first(values) for key, values in arguments.items()}
    return _tool_call(name, {key: value for key, value in given.items() if value != ""})


def _first(values: Any) -> Any:
    value = values[0] if isinstance(values, list) and values else values
    if isinstance(value, dict):
        return {key: _first(inner) for key, inner in value.items()}
    return value


def _python_call(text: str) -> str:
    """Return a reference call that is written as Python: ``mv(source='a', destination='b')``."""
    call = ast.parse(text, mode="eval").body
    assert isinstance(call, ast.Call)
    arguments = {f"arg{n}": ast.unparse(value) for n, value in enumerate(call.args)}
    arguments |= {str(word.arg): ast.literal_eval(word.value) for word in call.keywords}
    return _tool_call(ast.unparse(call.func), arguments)
