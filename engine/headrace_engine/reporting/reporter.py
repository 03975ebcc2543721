"""Decides when a replica reports, and makes its engine's part of a report."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from headrace_engine.meter import EngineMeter, Step
from headrace_engine.reporting.replica_publisher import ReplicaPublisher
from headrace_engine.reporting.report import Report
from headrace_kvstore.protocol.events import MIN_REPORT_INTERVAL_S

logger = logging.getLogger("headrace.engine")

EVERY_S = 0.15
"""Time between two reports if nothing changes. The timer may be late by 0.05 s: the publisher sends
beats, which say less, after 0.2 s without a report."""


class EngineFacts:
    """An engine's part of its replica's reports.

    Args:
        meter: the engine's meter; its steps are watched.
        block_tokens, token_bytes, step_tokens: as in a `Report`.
        blocks: number of blocks of the engine's KV cache.
    """

    def __init__(
        self,
        meter: EngineMeter,
        *,
        block_tokens: int,
        token_bytes: float,
        step_tokens: int,
        blocks: int,
    ) -> None:
        self._meter, self._blocks = meter, blocks
        self._sizes = {
            "block_tokens": block_tokens,
            "token_bytes": token_bytes,
            "step_tokens": step_tokens,
        }
        self._rows, self._context = 0, 0
        self._computed_at: float | None = None
        self.on_rows: list[Callable[[], None]] = []
        """Called when the number of decoding requests changes."""
        meter.on_step.append(self._on_step)

    def __call__(self) -> dict[str, Any]:
        meter, computed_at = self._meter, self._computed_at
        idle = not meter.running  # the last step is an old one then
        free = round((1.0 - meter.kv_usage) * self._blocks)
        return {
            **self._sizes,
            "running": 0 if idle else self._rows,
            "context": 0 if idle else self._context,
            "free_blocks": min(max(free, 0), self._blocks),
            "block_use": meter.block_use,
            "steps": meter.step_time.to_dict(),
            "computed_s": None if computed_at is None else time.monotonic() - computed_at,
        }

    def _on_step(self, step: Step) -> None:
        if step.prompt > 1:
            self._computed_at = time.monotonic()
        before, self._rows = self._rows, int(step.rows)
        self._context = int(step.context) if step.rows else 0
        if before != self._rows:
            for tell in self.on_rows:
                tell()


class Reporter:
    """Sender of reports: at each change, at most every 20 ms, and every `EVERY_S` without one. It
    reports while a gateway listens, from a call of `now` on. Made and used on the replica's event
    loop.

    Args:
        publisher: publishes the reports.
        facts: give the fields of a report; where two give the same field, the later one counts.
    """

    def __init__(
        self, publisher: ReplicaPublisher, *facts: Callable[[], Mapping[str, Any]]
    ) -> None:
        self._publisher, self._facts = publisher, facts
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._reported_s = 0.0
        self._due_s = math.inf
        self._closed = self._complained = False
        self.reports = self.failures = 0

    def changed(self) -> None:
        """Report soon, because something in the report has changed. Returns at once."""
        if not self._publisher.has_subscribers:
            return
        due_s = max(self._loop.time(), self._reported_s + MIN_REPORT_INTERVAL_S)
        if due_s < self._due_s and not self._closed:
            self._arm(due_s)

    def now(self) -> None:
        """Report at once, and from now on; to be called when a gateway begins to listen."""
        if not self._closed:
            self._report()

    def close(self) -> None:
        """Stop reporting."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()

    def _arm(self, due_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._due_s = due_s
        self._timer = self._loop.call_at(due_s, self._report)

    def _report(self) -> None:
        self._reported_s, self._due_s = self._loop.time(), math.inf
        if not self._publisher.has_subscribers:
            return
        self._arm(self._reported_s + EVERY_S)
        try:
            fields: dict[str, Any] = {}
            for fact in self._facts:
                fields.update(fact())
            self._publisher.report(msgspec.convert(fields, Report))
            self.reports += 1
        except Exception:
            self.failures += 1
            if not self._complained:
                self._complained = True
                logger.exception("this replica cannot report how it stands; this is said once")
