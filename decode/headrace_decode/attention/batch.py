"""A request's row in a step's batch, as all ways to attend see it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from headrace_decode.techniques import SPARSE, keep_ratio_in


@dataclass(frozen=True)
class BatchRow:
    """A request's row in a step.

    Attributes:
        request_id: vLLM's request id.
        keep_ratio: part of the pages that it attends to, see `techniques`; None for an exact
            request.
        prompt_tokens: number of tokens of its prompt.
    """

    request_id: str
    keep_ratio: float | None
    prompt_tokens: int


def batch_row(request_id: str, params: Any, prompt_tokens: int) -> BatchRow:
    """Return the row of a request with these sampling parameters."""
    return BatchRow(request_id, keep_ratio_in(params, SPARSE), prompt_tokens)
