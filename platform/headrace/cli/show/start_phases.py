"""The waterfall of a start: one line for each step of `headrace up` and each phase of a replica."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from rich.console import Console

from headrace.cli.display import Step
from headrace.cli.show.status import short_name

BAR_CHARS = 32


def show(steps: Sequence[Step], replicas: Iterable[dict[str, Any]], out: Console) -> None:
    """Print the waterfall.

    Args:
        steps: those of the command, in their order.
        replicas: as `GET /headrace/v1/status` lists them.
    """
    for line in waterfall([*steps, *phases(replicas)]):
        out.print(line, markup=False)


def phases(replicas: Iterable[dict[str, Any]]) -> Iterator[Step]:
    """Yield the phases of each replica's start."""
    for replica in replicas:
        start = replica.get("start") or {"began": 0.0, "phases": {}}
        began = start["began"]
        for name, seconds in start["phases"].items():
            yield Step(f"{short_name(replica)}: {name.replace('_', ' ')}", began, seconds)
            began += seconds


def waterfall(steps: Sequence[Step]) -> Iterator[str]:
    """Yield a line for each step: when it began, how long it took, and a bar in a common scale."""
    if not steps:
        return
    first = min(step.began for step in steps)
    scale = BAR_CHARS / max(0.001, max(step.began + step.seconds for step in steps) - first)
    width = max(len(step.name) for step in steps)
    for step in steps:
        at = step.began - first
        left = min(BAR_CHARS - 1, int(at * scale))
        bar = " " * left + "#" * max(1, min(BAR_CHARS - left, round(step.seconds * scale)))
        yield f"{at:5.1f} s {step.seconds:6.1f} s  {step.name:<{width}}  {bar}".rstrip()
