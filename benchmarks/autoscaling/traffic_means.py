"""Mean costs of the last requests that ended, for `TrafficLoad`."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from headrace.disaggregation import TrafficLoad
from headrace_engine.step_time import StepTime

KEPT = 16_384
"""Number of requests kept: an hour at 4.5 a second. With fewer, the means fluctuate: of a few
thousand prompts the few longest take most of the time, so the number of replicas would fluctuate
with them."""
LEAST = 32
"""Minimum number of requests for a mean."""
COLUMNS = ("prompt_tokens", "answer_tokens", "local_s", "remote_s")


@dataclass(slots=True)
class TrafficMeans:
    """The last requests: tokens of the prompt and of the answer, and the seconds to compute the
    prompt on a decode engine and on a prefill engine."""

    _rows: NDArray[np.float64] = field(default_factory=lambda: np.zeros((KEPT, len(COLUMNS))))
    _seen: int = 0

    def record_ended(self, rows: NDArray[np.float64]) -> None:
        """Record requests that ended, one for each row; float64 [requests, 4]."""
        rows = rows[-KEPT:]
        at = (self._seen + np.arange(len(rows))) % KEPT
        self._rows[at] = rows
        self._seen += len(rows)

    def load(self, decode_steps: StepTime, kv_tokens: int, move_s: float) -> TrafficLoad | None:
        """Return the means as a `TrafficLoad` with a rate of 0; None below `LEAST` requests.

        Args:
            kv_tokens: tokens that a decode engine's cache holds.
            move_s: as in `TrafficLoad`.
        """
        if self._seen < LEAST:
            return None
        rows = self._rows[: min(self._seen, KEPT)]
        prompt, answer, local_s, remote_s = rows.mean(axis=0).tolist()
        return TrafficLoad(
            rate=0.0,
            prompt_tokens=prompt,
            answer_tokens=answer,
            local_s=local_s,
            local_square=float((rows[:, 2] ** 2).mean()),
            remote_s=remote_s,
            remote_square=float((rows[:, 3] ** 2).mean()),
            move_s=move_s,
            steps=decode_steps,
            most_running=max(1, int(kv_tokens / max(1.0, prompt + answer / 2))),
        )
