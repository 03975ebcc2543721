"""Circuit breaker of a prefill replica."""

from __future__ import annotations

from typing import Any, Literal


class PrefillBreaker:
    """Circuit breaker of one prefill replica: whether plans may use it.

    - closed: they may.
    - open: they may not. After a failed request the breaker becomes half-open when the wait is
      over. After ``mark_down()`` (the caller knows that the replica does not run) it stays open
      until ``mark_up()``.
    - half-open: one trial request may be sent. Its success closes the breaker, its failure opens it
      again, and its end without either allows another trial.

    The caller probes the replica and calls ``mark_up()``, which closes the breaker after
    ``mark_down()`` and after one failure. After a second failure without a success in between, an
    answered probe is not enough: the wait doubles with each failure, and a trial must succeed.

    A request that was sent before the breaker last closed may fail late (time-out). Its cause is
    over, so its failure does not open the breaker.
    """

    def __init__(self, retry_s: float, retry_max_s: float) -> None:
        self._retry_s = retry_s
        self._retry_max_s = retry_max_s
        self._wait_s = retry_s
        self._open = False
        self._down = False
        self._trial: str | None = None
        self._epoch = 0
        self._sent: dict[str, int] = {}
        #: Number of openings since the last success.
        self._openings = 0
        self.reason = ""
        self.since_s = 0.0
        self.failures = 0

    def state(self, now_s: float) -> Literal["closed", "open", "half-open"]:
        if not self._open:
            return "closed"
        if not self._down and now_s - self.since_s >= self._wait_s:
            return "half-open"
        return "open"

    def refusal(self, now_s: float) -> str | None:
        """Return why no request may be sent to the replica now, or None if one may."""
        state = self.state(now_s)
        if state == "closed":
            return None
        if state == "half-open":
            if self._trial is None:
                return None
            return f"a trial request is under way after: {self.reason}"
        return f"prefill is unavailable for {now_s - self.since_s:.1f} s: {self.reason}"

    def on_sent(self, request_id: str, now_s: float) -> None:
        """Record that a request was sent to the replica; in half-open it is the trial."""
        self._sent[request_id] = self._epoch
        if self.state(now_s) == "half-open":
            self._trial = request_id

    def on_success(self, request_id: str) -> None:
        """Record that a remote request got its KV. While open, only a trial's success counts."""
        if self._trial == request_id:
            self._close()
        if self._sent.get(request_id) == self._epoch and not self._open:
            self._openings = 0
        self.on_end(request_id)

    def on_end(self, request_id: str) -> None:
        """Drop a request that ended, with or without a success or failure."""
        self._sent.pop(request_id, None)
        if self._trial == request_id:
            self._trial = None

    def on_failure(self, request_id: str, why: str, now_s: float) -> None:
        """Record that a remote request failed or timed out."""
        self.failures += 1
        current = self._sent.get(request_id, self._epoch) == self._epoch
        was_trial = self._trial == request_id
        self.on_end(request_id)
        if self._down or not current:
            return
        if was_trial or not self._open:
            self._wait_s = min(self._retry_s * 2.0**self._openings, self._retry_max_s)
            self._openings += 1
        self._open, self.reason, self.since_s = True, why, now_s

    def mark_down(self, why: str, now_s: float) -> None:
        """Open the breaker until ``mark_up()``, because the replica does not run."""
        if not self._down:
            self.since_s = now_s
        self._open, self._down, self._trial, self.reason = True, True, None, why

    def mark_up(self) -> None:
        """Record an answered probe. Repeated calls are harmless."""
        if self._down:
            self._openings = 0
            self._close()
        elif self._open and self._openings <= 1:
            self._close()

    def _close(self) -> None:
        self._open, self._down, self._trial, self.reason = False, False, None, ""
        self._epoch += 1

    def to_dict(self, now_s: float) -> dict[str, Any]:
        return {
            "state": self.state(now_s),
            "reason": self.reason,
            "open_s": now_s - self.since_s if self._open else 0.0,
            "failures": self.failures,
        }
