"""Outstanding work of an engine.

Work is reserved when a plan is made, not when the work starts, so the next plan sees it.
"""

from __future__ import annotations

from collections import OrderedDict

from headrace_engine.step_time import StepTime


class EngineLoad:
    """One engine's outstanding prefills (in order of arrival) and its running decodes."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[str, tuple[int, int]] = OrderedDict()
        self._running: dict[str, int] = {}
        self._tokens = self._pairs = 0
        self._head_since_s = 0.0

    @property
    def waiting_tokens(self) -> int:
        return self._tokens

    @property
    def waiting_requests(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def running_context(self) -> int:
        """Known tokens of all running decodes together."""
        return sum(self._running.values())

    def reserve(self, request_id: str, tokens: int, now_s: float, pairs: int = 0) -> None:
        """Book the computation of ``tokens`` prompt tokens with ``pairs`` attention pairs.

        Replaces an earlier booking of this request.
        """
        self.release(request_id, now_s)
        if not self._waiting:
            self._head_since_s = now_s
        self._waiting[request_id] = tokens, pairs
        self._tokens += tokens
        self._pairs += pairs

    def release(self, request_id: str, now_s: float) -> None:
        """Remove the booking of a computation that is done, failed or cancelled.

        Unknown ids are ignored.
        """
        if request_id not in self._waiting:
            return
        was_head = next(iter(self._waiting)) == request_id
        tokens, pairs = self._waiting.pop(request_id)
        self._tokens -= tokens
        self._pairs -= pairs
        if was_head:
            self._head_since_s = now_s

    def start(self, request_id: str, context: int = 0) -> None:
        """Record that the request decodes from now on, after ``context`` tokens."""
        self._running[request_id] = context

    def stop(self, request_id: str) -> None:
        self._running.pop(request_id, None)

    def queue_s(self, model: StepTime, max_step_tokens: int, now_s: float) -> float:
        """Return the seconds until the prefills ahead are done, from their tokens' step times.

        The time since the first prefill began is subtracted, at most that prefill's own share: an
        overdue prefill is expected to end now, and the later ones still count in full.
        """
        if not self._waiting:
            return 0.0
        everything, behind = self._times(model, max_step_tokens)
        elapsed = max(0.0, now_s - self._head_since_s)
        return max(behind, everything - elapsed)

    def ahead(self, model: StepTime, max_step_tokens: int, now_s: float) -> tuple[int, float]:
        """Return the prompt tokens still to compute, and their attention pairs.

        The part of the first prompt that its elapsed time covers is subtracted, as in `queue_s`.
        """
        if not self._waiting:
            return 0, 0.0
        everything, behind = self._times(model, max_step_tokens)
        elapsed = max(0.0, now_s - self._head_since_s)
        had = float(min(1.0, elapsed / max(everything - behind, 1e-9)))
        tokens, pairs = next(iter(self._waiting.values()))
        return self._tokens - int(had * tokens), self._pairs - had * pairs

    def _times(self, model: StepTime, max_step_tokens: int) -> tuple[float, float]:
        """Return the seconds of all prompts ahead, and of all but the first."""
        tokens, pairs = next(iter(self._waiting.values()))
        rows, context = len(self._running), self.running_context
        everything, behind = (
            model.prefill_s(*left, step_tokens=max_step_tokens, rows=rows, context=context)
            for left in (
                (self._tokens, self._pairs),
                (self._tokens - tokens, self._pairs - pairs),
            )
        )
        return everything, behind

    def to_dict(self) -> dict[str, int]:
        return {
            "waiting_tokens": self._tokens,
            "waiting_requests": len(self._waiting),
            "running": len(self._running),
        }
