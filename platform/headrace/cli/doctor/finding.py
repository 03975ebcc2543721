"""A finding: the result of one check, its severity and its remedy. Also prints findings."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from rich.table import Table

Level = Literal["OK", "WARN", "FAIL"]
STYLES = {"OK": "green", "WARN": "yellow", "FAIL": "red"}
ORDER = {"OK": 0, "WARN": 1, "FAIL": 2}

# Kubernetes keeps so many bytes of /dev/termination-log.
TERMINATION_BYTES = 4096


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    what: str
    level: Level
    found: str
    remedy: str = ""

    def line(self) -> str:
        """Return one line for logs and events."""
        text = f"{self.level} {self.what}: {self.found}"
        return f"{text}. Remedy: {self.remedy}" if self.remedy else text


Check = tuple[str, Callable[[], list[Finding]]]


def run(
    checks: Sequence[Check], before: Callable[[str], None] = lambda name: None
) -> list[Finding]:
    """Return the findings of all checks, in order. `before` gets the name of each check first."""
    findings: list[Finding] = []
    for name, check in checks:
        before(name)
        try:
            findings += check()
        except Exception as error:  # a probe that fails is a finding, not a traceback
            findings.append(Finding(name, "WARN", f"could not be checked: {error}"))
    return findings


def failed(findings: Sequence[Finding]) -> bool:
    return any(f.level == "FAIL" for f in findings)


def verdict(findings: Sequence[Finding]) -> str:
    """Return the result of all checks in a line."""
    wrong, doubtful = (sum(f.level == level for f in findings) for level in ("FAIL", "WARN"))
    warnings = f"{doubtful} warning{'s' * (doubtful != 1)}" if doubtful else ""
    if wrong:
        return f"{wrong} problem{'s' * (wrong != 1)}" + (f", {warnings}" if warnings else "")
    return "Ready" + (f", with {warnings}" if warnings else "")


def as_json(findings: Sequence[Finding]) -> str:
    return json.dumps([asdict(f) for f in findings], indent=2)


def as_lines(findings: Sequence[Finding]) -> str:
    """Return a line for each finding, the worst last: Kubernetes shows the end of a log."""
    return "\n".join(f.line() for f in sorted(findings, key=lambda f: ORDER[f.level]))


def as_table(findings: Sequence[Finding]) -> Table:
    """Return the findings as a table."""
    out = Table(box=None, pad_edge=False)
    for column in ("", "what", "found", "remedy"):
        out.add_column(column, overflow="fold")
    for f in findings:
        out.add_row(f"[{STYLES[f.level]}]{f.level}[/]", f.what, f.found, f.remedy)
    return out


def leave_message(findings: Sequence[Finding], file: Path) -> None:
    """Write the problems, the worst first, to the file that Kubernetes reads when a container ends.

    Does nothing if the file does not exist, cannot be written, or nothing is wrong.
    """
    wrong = sorted((f for f in findings if f.level != "OK"), key=lambda f: -ORDER[f.level])
    if not wrong or not file.exists():
        return
    text = "\n".join(f.line() for f in wrong).encode()
    if len(text) > TERMINATION_BYTES:
        tail = b"\n... the log of this container has the rest"
        head = text[: TERMINATION_BYTES - len(tail)].decode(errors="ignore").encode()
        text = head + tail
    try:
        file.write_bytes(text)
    except OSError:
        return
