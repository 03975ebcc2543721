"""Real grammars through the real worker, with the checks and compilers of the installed vLLM."""

from __future__ import annotations

import asyncio
import json
import pickle
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from headrace_decode.grammars.trials import GrammarRefused, GrammarTrials, TrialUnfinished
from headrace_engine.extensions.extension import EXTENSIBLE_SCHEDULERS
from tests.support.tiny import tiny_llama

pytestmark = pytest.mark.timeout(300)

ASKED_AGAIN = 3


class Loop:
    """The worker, and the loop that it is used from."""

    def __init__(self) -> None:
        from vllm.engine.arg_utils import EngineArgs

        config = EngineArgs(model=str(tiny_llama()), dtype="float32").create_engine_config()
        config.scheduler_config.scheduler_cls = EXTENSIBLE_SCHEDULERS[
            False
        ]  # as in a decode engine
        self.loop = asyncio.new_event_loop()
        self.trials = GrammarTrials(pickle.dumps(config))

    def passed(self, spec: dict[str, Any]) -> dict[str, Any]:
        """What the trial answered. A trial takes only the time that the machine has left, so one
        that did not end is begun again, as its error says."""
        for _ in range(ASKED_AGAIN):
            with suppress(TrialUnfinished):
                return self.loop.run_until_complete(self.trials.passed(spec, "t"))
        return self.loop.run_until_complete(self.trials.passed(spec, "t"))


@contextmanager
def running() -> Iterator[Loop]:
    made = Loop()
    try:
        yield made
    finally:
        made.loop.run_until_complete(made.trials.aclose())
        made.loop.run_until_complete(asyncio.sleep(0.1))  # the loop closes the worker's pipes
        made.loop.close()


@pytest.fixture(scope="module")
def worker() -> Iterator[Loop]:
    with running() as made:
        yield made


def schema(levels: int) -> dict[str, Any]:
    inner: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        inner = {"type": "object", "properties": {"a": inner}, "required": ["a"]}
    return inner


USUAL: list[dict[str, Any]] = [
    {"regex": "[a-z]{1,20}"},
    {"choice": ["red", "green"]},
    {"json": schema(10)},
    {"json": json.dumps(schema(3))},
    {"json": {"type": "object", "properties": {f"k{n}": {"type": "integer"} for n in range(100)}}},
    {"json_object": True},
    {"grammar": 'root ::= "yes" | "no"'},
    {"grammar": 'start: "yes" | "no"'},
    {"json": {"type": "integer", "multipleOf": 3}},
    {
        "structural_tag": json.dumps(
            {
                "structures": [{"begin": "<f>", "schema": {"type": "object"}, "end": "</f>"}],
                "triggers": ["<f>"],
            }
        )
    },
]


@pytest.mark.parametrize("spec", USUAL, ids=lambda spec: next(iter(spec)))
def test_a_usual_grammar_passes(worker: Loop, spec: dict[str, Any]) -> None:
    found = worker.passed(spec)
    assert found["backend"] in ("xgrammar", "guidance")
    assert found["spec"]


def test_choices_reach_the_engine_as_the_grammar_that_vllm_makes_of_them(worker: Loop) -> None:
    assert worker.passed({"choice": ["red", "green"]})["spec"] == {
        "grammar": 'root ::= "red" | "green"'
    }


HOSTILE: dict[str, dict[str, Any]] = {
    "a brace and spaces": {"regex": "{" + " " * 1600},
    "a thousand alternatives": {"regex": "|".join("a" * n for n in range(700))},
    "parentheses": {"regex": "(" * 100_000 + "a" + ")" * 100_000},
    "nested too deep": {"json": json.dumps(schema(60)).replace('"string"', "[" * 5000)},
    "a NUL": {"regex": "a\0"},
    "no grammar": {"grammar": "root ::= ((("},
    "ambiguous": {
        "grammar": 'root ::= x x x | "a"\nx ::= root root | root | "b" x | x "b"\n',
    },
    "no JSON": {"json": "{"},
    "json_object false": {"json_object": False},
    "nothing": {"json_object": None},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_grammar_is_refused_with_a_reason(worker: Loop, name: str) -> None:
    with pytest.raises(GrammarRefused) as refused:
        worker.passed(HOSTILE[name])
    assert len(str(refused.value)) > 10


@pytest.mark.parametrize("regex", ["(a{1000}){1000}", "(a+)+b", "((a*)*)*b", ".{0,9999}" * 3])
def test_a_grammar_that_only_looks_hostile_ends_one_way_or_the_other(
    worker: Loop, regex: str
) -> None:
    try:
        assert worker.passed({"regex": regex})["spec"] == {"regex": regex}
    except GrammarRefused as refused:
        assert str(refused)
