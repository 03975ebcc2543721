"""A seeded request whose prompt takes several steps is answered like one that takes one step.

On CPUs vLLM's own worker ends at such a request, and with it the engine.
"""

from __future__ import annotations

import pytest

from tests.support.forked import told
from tests.support.program import IN_ONE_PROCESS
from tests.support.tiny import tiny_llama

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(300)]


def test_answers_do_not_depend_on_the_steps_of_the_prompt() -> None:
    whole, parts = told("seeded_engine", str(tiny_llama()), timeout_s=200.0, **IN_ONE_PROCESS)
    assert parts == whole
    assert len({tuple(answer) for answer in whole}) == len(whole)
