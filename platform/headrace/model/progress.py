"""Reports the progress of a fetch.

A `Progress` is called with a stage in words, the bytes that are done, and all bytes of the stage.
A total of 0 means that the total is not known. A new stage ends the one before.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.progress import Progress as Bars

Progress = Callable[[str, int, int], None]


def silent(stage: str, done_bytes: int, total_bytes: int) -> None:
    """Report nothing."""


@contextmanager
def terminal(console: Console | None = None) -> Iterator[Progress]:
    """Show bars on a terminal (stderr by default); print one line a stage where there is none."""
    console = console or Console(stderr=True)
    if not console.is_terminal:
        yield _lines(console)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Bars(*columns, console=console) as bars:
        tasks: dict[str, TaskID] = {}

        def report(stage: str, done_bytes: int, total_bytes: int) -> None:
            if stage not in tasks:
                for earlier in tasks.values():
                    size = bars.tasks[earlier].total or 1
                    bars.update(earlier, total=size, completed=size)
                tasks[stage] = bars.add_task(stage)
            bars.update(tasks[stage], completed=done_bytes, total=total_bytes or None)

        yield report


def _lines(console: Console) -> Progress:
    seen: set[str] = set()

    def report(stage: str, done_bytes: int, total_bytes: int) -> None:
        if stage not in seen:
            seen.add(stage)
            console.print(f"{stage} ...", highlight=False)

    return report
