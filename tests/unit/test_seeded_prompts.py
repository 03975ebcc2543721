"""The generator of a seeded request is away while a step computes only a part of its prompt."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm import SamplingParams

from headrace_engine.vllm.worker import SeededPrompts

PROMPT = list(range(100))


class Runner:
    """The parts of vLLM's first model runner that know generators."""

    def __init__(self) -> None:
        self.requests: dict[str, Any] = {}
        self.input_batch: Any = SimpleNamespace(req_id_to_index={}, generators={})

    def run(self, step: Any) -> None:
        """Take up a step's requests as `_update_states` does."""
        for new in step.scheduled_new_reqs:
            generator = None
            if new.sampling_params.seed is not None:
                generator = torch.Generator().manual_seed(new.sampling_params.seed)
            self.requests[new.req_id] = SimpleNamespace(
                generator=generator, sampling_params=new.sampling_params, num_tokens=len(PROMPT)
            )
            self.join(new.req_id)

    def join(self, name: str) -> None:
        row = self.input_batch.req_id_to_index[name] = len(self.input_batch.req_id_to_index)
        if self.requests[name].generator is not None:
            self.input_batch.generators[row] = self.requests[name].generator

    def leave(self, name: str) -> None:
        self.input_batch.generators.pop(self.input_batch.req_id_to_index.pop(name), None)


def step(tokens: int, computed: int | None = None, params: Any = None, finished: str = "") -> Any:
    """A step of one request: new with its parameters, or one that has computed some tokens."""
    new = SimpleNamespace(
        req_id="a", sampling_params=params, prompt_token_ids=PROMPT, num_computed_tokens=0
    )
    names, counts = ([], []) if computed is None else (["a"], [computed])
    return SimpleNamespace(
        scheduled_new_reqs=[new] if params is not None else [],
        scheduled_cached_reqs=SimpleNamespace(req_ids=names, num_computed_tokens=counts),
        num_scheduled_tokens={"a": tokens},
        finished_req_ids={finished} if finished else set(),
    )


def seeded() -> SamplingParams:
    return SamplingParams(temperature=1.0, seed=7)


def test_it_comes_back_unused_with_the_step_that_ends_the_prompt() -> None:
    runner, params = Runner(), seeded()
    prompts = SeededPrompts(runner)
    runner.run(prompts.prepare(step(60, params=params)))
    assert runner.requests["a"].generator is None and params.seed == 7
    prompts.prepare(step(30, 60))
    assert not runner.input_batch.generators
    prompts.prepare(step(10, 90))
    generator = runner.input_batch.generators[0]
    assert generator is runner.requests["a"].generator
    assert torch.equal(generator.get_state(), torch.Generator().manual_seed(7).get_state())
    assert runner.requests["a"].sampling_params is params


def test_a_preempted_request_draws_on_where_it_was_after_its_prompt_is_computed_again() -> None:
    runner = Runner()
    prompts = SeededPrompts(runner)
    runner.run(prompts.prepare(step(100, params=seeded())))
    state = runner.requests["a"]
    torch.rand(3, generator=state.generator)
    before, state.num_tokens = state.generator.get_state(), 104
    runner.leave("a")
    prompts.prepare(step(60, 0))
    runner.join("a")
    assert not runner.input_batch.generators
    prompts.prepare(step(44, 60))
    assert torch.equal(runner.input_batch.generators[0].get_state(), before)


@pytest.mark.parametrize(
    ("tokens", "params"),
    [
        (100, seeded()),
        (60, SamplingParams(temperature=1.0)),
        (60, SamplingParams(temperature=0.0, seed=7)),
    ],
    ids=["whole prompt", "no seed", "greedy"],
)
def test_other_steps_are_the_schedulers_own(tokens: int, params: SamplingParams) -> None:
    asked = step(tokens, params=params)
    assert SeededPrompts(Runner()).prepare(asked) is asked


def test_nothing_is_kept_of_a_request_that_has_ended() -> None:
    prompts = SeededPrompts(Runner())
    prompts.prepare(step(60, params=seeded()))
    prompts.prepare(step(0, finished="a"))
    assert not prompts._withheld and not prompts._params
