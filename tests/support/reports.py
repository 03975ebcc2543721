"""Reports of replicas that stand for any."""

from __future__ import annotations

from typing import Any

from headrace_engine.reporting.report import Report
from headrace_engine.step_time import StepTime


def report(replica: str = "a", **changes: Any) -> Report:
    fields: dict[str, Any] = dict(
        replica=replica,
        role="decode",
        machine="node",
        block_tokens=16,
        token_bytes=1024.0,
        step_tokens=2048,
        steps=StepTime().to_dict(),
    )
    return Report(**{**fields, **changes})
