"""Output of the command line: results on stdout, all else on stderr, errors in one line."""

from __future__ import annotations

from rich.console import Console


class CliError(Exception):
    """Ends the command with one line on stderr.

    Attributes:
        exit_code: 1 for a failure, 2 for a wrong request.
    """

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def stdout() -> Console:
    """Return a console for results. Each use makes one, so that tests can redirect the stream."""
    return Console(highlight=False, soft_wrap=True)


def stderr() -> Console:
    """Return a console for progress and warnings."""
    return Console(stderr=True, highlight=False, soft_wrap=True)


def human_bytes(count: float) -> str:
    """Format a size: `1536` -> `1.5 KiB`."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(count) < 1024 or unit == "TiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError("unreachable")


def human_time(seconds: float) -> str:
    """Format a duration: `0.0034` -> `3.4 ms`, `0.35` -> `350 ms`, `1.5` -> `1.50 s`."""
    if abs(seconds) >= 1:
        return f"{seconds:.2f} s" if abs(seconds) < 100 else f"{seconds:,.0f} s"
    ms = 1e3 * seconds
    return f"{ms:.1f} ms" if abs(ms) < 9.95 and ms else f"{ms:.0f} ms"


def human_seconds(seconds: float) -> str:
    """Format a time: `3723` -> `1 h 2 min`, `75` -> `1 min 15 s`, `7` -> `7 s`."""
    whole = int(seconds)
    if whole >= 3600:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 60} min {whole % 60} s" if whole >= 60 else f"{whole} s"
