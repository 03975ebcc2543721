"""The progress of `headrace up`: a live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from types import TracebackType
from typing import NamedTuple, Self

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from headrace.cli.console import human_seconds
from headrace.cli.deploy import Progress, cause

MESSAGE_CHARS = 70


class Step(NamedTuple):
    """A step that has ended.

    Attributes:
        began: seconds since the epoch.
    """

    name: str
    began: float
    seconds: float


class Display:
    """The steps, one at a time, and the app's deployments below them."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live: Live | None = None
        self._started = time.monotonic()
        self.steps: list[Step] = []
        """The steps that have ended, in their order."""
        self._step = ""
        self._step_since = self._started
        self._note = ""
        self._progress: Progress | None = None
        self._printed: dict[str, str] = {}

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live = Live(self, console=self._console, refresh_per_second=4, transient=True)
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    @property
    def elapsed_s(self) -> float:
        """Seconds since the display was made."""
        return time.monotonic() - self._started

    def step(self, text: str) -> None:
        """Begin a step; this ends the previous one."""
        self.finish()
        self._step, self._step_since, self._note = text, time.monotonic(), ""
        if self._live is None:
            self._line(text)

    def finish(self) -> None:
        """End the current step, if there is one."""
        if not self._step:
            return
        seconds = time.monotonic() - self._step_since
        self.steps.append(Step(self._step, time.time() - seconds, seconds))
        if self._live is not None:
            self._live.console.print(Text(f"  done  {self._step} ({seconds:.0f} s)", style="dim"))
        self._step = ""

    def note(self, text: str) -> None:
        """Set the progress of the current step; shown on a terminal only."""
        self._note = text

    def show(self, progress: Progress) -> None:
        """Show the app's progress."""
        self._progress = progress
        if self._live is not None:
            return
        for deployment in progress.deployments:
            text = f"{deployment.name}: {deployment.status.lower()}"
            text += f", {deployment.running} of {deployment.total} replicas run"
            if self._printed.get(deployment.name) != text:
                self._printed[deployment.name] = text
                self._line(text)

    def _line(self, text: str) -> None:
        self._console.print(f"[{self.elapsed_s:4.0f} s] {text}", markup=False)

    def __rich__(self) -> Table:
        table = Table.grid(padding=(0, 2))
        head = (
            f"{self._step} {self._note}".rstrip()
            + f" ({human_seconds(time.monotonic() - self._step_since)})"
        )
        table.add_row(Text("  ...", style="cyan"), Text(head, style="bold"))
        for d in self._progress.deployments if self._progress else ():
            style = {"HEALTHY": "green", "UPDATING": "yellow"}.get(d.status, "red")
            words = f"{d.status.lower()}, {d.running} of {d.total} replicas"
            row = Text.assemble((f"{d.name:<10}", "bold"), (words, style))
            if d.message and d.status != "HEALTHY":
                row.append(f"  {cause(d.message)[:MESSAGE_CHARS]}", style="dim")
            table.add_row("", row)
        return table
