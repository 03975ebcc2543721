"""Reports requests whose KV a worker has lost to the scheduler, which ends them with an error.

The scheduler of such an engine gives blocks of running requests to others, and its worker keeps the
KV that the requests need. If the two disagree, or an error occurs, only the worker knows. It
reports these requests with the step's output. The scheduler then ends them like vLLM ends a request
whose grammar fails. No token that was computed for them in that step reaches a client.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

from headrace_engine.vllm.scheduling import AsyncModelRunnerOutput

LOST = "headrace_lost"
"""Attribute of a step's `ModelRunnerOutput`: ids of the requests."""


class _Later(AsyncModelRunnerOutput):  # type: ignore[misc]
    """Output that is not available yet."""

    def __init__(self, output: Any, names: frozenset[str]) -> None:
        self._output, self._names = output, names

    def get_output(self) -> Any:
        return with_lost(self._output.get_output(), self._names)


def with_lost(output: Any, names: Iterable[str]) -> Any:
    """Return a step's output that reports these requests."""
    lost = frozenset(names)
    if output is None or not lost:
        return output
    if isinstance(output, AsyncModelRunnerOutput):
        return _Later(output, lost)
    reported = copy.copy(output)  # vLLM shares the output of steps without tokens
    setattr(reported, LOST, lost)
    return reported


def end_lost(scheduler: Any, output: Any) -> None:
    """Have a vLLM scheduler end the requests that a step's output reports, when it processes the
    output."""
    for name in getattr(output, LOST, ()):
        if name in scheduler.requests:
            scheduler.grammar_compile_error_reqs.add(name)
        if output.sampled_token_ids and name in output.req_id_to_index:
            output.sampled_token_ids[output.req_id_to_index[name]] = []
