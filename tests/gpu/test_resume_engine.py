"""A request that an engine on a GPU resumes after the tokens of another engine's answer.

One engine for each of vLLM's model runners, each with vLLM's default scheduling.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from benchmarks.gpu.engine import make_llm
from headrace_decode.resume.scheduler import RESUME_TOKENS
from headrace_engine.extensions.extension import EXTENSIBLE_SCHEDULERS, EXTENSIBLE_WORKER
from tests.support.gpu_answers import answers, assert_alike

pytestmark = pytest.mark.gpu

RUNNERS = ["0", "1"] if torch.cuda.is_available() else ["0"]
"""vLLM for CPUs has the first only."""
PROMPT, COUNT = [100 + i * 13 % 1900 for i in range(700)], 24


@pytest.fixture(scope="module", params=RUNNERS, ids=lambda runner: f"runner {int(runner) + 1}")
def llm(request: Any) -> Iterator[Any]:
    patch = pytest.MonkeyPatch()
    patch.setenv("VLLM_USE_V2_MODEL_RUNNER", request.param)
    made = make_llm(
        *(None, 4096, 0.3),
        worker_cls=EXTENSIBLE_WORKER,
        scheduler_cls=EXTENSIBLE_SCHEDULERS[torch.cuda.is_available()],
    )
    yield made
    patch.undo()
    del made


@pytest.mark.parametrize("place", [1, 10, COUNT - 1])
def test_the_rest_is_that_of_the_whole_answer(llm: Any, place: int) -> None:
    [whole] = answers(llm, [PROMPT], count=COUNT)
    earlier = [token for token, _ in whole[:place]]
    [rest] = answers(llm, [PROMPT], count=COUNT, extra=[{RESUME_TOKENS: earlier}])
    assert_alike([rest[-(COUNT - place) :]], [whole[place:]])


def test_a_resumed_request_leaves_requests_beside_it_alone(llm: Any) -> None:
    others = [[token + n for token in PROMPT] for n in (1, 2)]
    plain = answers(llm, others, count=COUNT)
    [whole] = answers(llm, [PROMPT], count=COUNT)
    earlier = {RESUME_TOKENS: [token for token, _ in whole[:10]]}
    prompts = [others[0], PROMPT, others[1]]
    found = answers(llm, prompts, count=COUNT, extra=[None, earlier, None])
    assert_alike([found[0], found[2]], plain)
    assert_alike([found[1][-(COUNT - 10) :]], [whole[10:]])
