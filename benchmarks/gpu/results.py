"""What the parts found, kept in a file in the repository, and which part comes next. Pure, except
for reading and writing the file."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.gpu.parts import Part

FORMAT = 1
STATUSES = ("done", "failed", "stopped")


class Run(msgspec.Struct, forbid_unknown_fields=True):
    """The last run of a part on a card.

    Attributes:
        status: `done`; `failed`, its process ended with an error; or `stopped`, at its limit.
        date: ISO, of the day.
        card, driver, software: names and versions.
        commit: of the repository.
        command: that runs the part alone.
        seconds: that it took.
        figures: by name; of a part that did not end, those that it had.
        found: everything that it measured.
        note: why it did not end, or what else a reader must know.
    """

    status: str
    date: str
    card: str
    driver: str
    software: str
    commit: str
    command: str
    seconds: float
    figures: dict[str, float] = {}
    found: dict[str, Any] = {}
    note: str = ""


class Results(msgspec.Struct, forbid_unknown_fields=True):
    """Runs by part.

    Attributes:
        format: of the file.
    """

    format: int = FORMAT
    runs: dict[str, Run] = {}


def read(path: Path) -> Results:
    """Return the results in a file; empty ones if there is none.

    Raises:
        ValueError: the file is not one of results.
    """
    if not path.exists():
        return Results()
    try:
        results = msgspec.json.decode(path.read_bytes(), type=Results)
    except msgspec.DecodeError as error:
        raise ValueError(f"{path}: {error}") from error
    if results.format != FORMAT:
        raise ValueError(f"{path}: format {results.format} is not {FORMAT}")
    for name, run in results.runs.items():
        if run.status not in STATUSES:
            raise ValueError(f"{path}: runs.{name}.status: {run.status} is none of {STATUSES}")
    return results


def write(path: Path, results: Results) -> None:
    """Replace the file in one step, so that a process that is killed leaves the old or the new."""
    text = json.dumps(msgspec.to_builtins(results), indent=1, ensure_ascii=False)
    beside = path.with_name(f"{path.name}.new")
    beside.write_text(text + "\n")
    os.replace(beside, path)


def order(parts: Sequence[Part], results: Results, commit: str) -> list[Part]:
    """Return the parts that have not ended, in the list's order; those that were tried at this
    commit come last, since nothing has changed for them."""
    left = [
        part
        for part in parts
        if not part.open
        and (part.name not in results.runs or results.runs[part.name].status != "done")
    ]

    def was_tried(part: Part) -> bool:
        run = results.runs.get(part.name)
        return run is not None and bool(commit) and run.commit == commit

    return sorted(left, key=was_tried)


def table(parts: Sequence[Part], results: Results) -> str:
    """Return Markdown: a table of the parts, each with its figures and targets or why it is open,
    and a list of the machines that they ran on."""
    machines: list[str] = []
    lines = ["| part | question | found | run |", "|---|---|---|---|"]
    for part in parts:
        run = results.runs.get(part.name)
        if run is None:
            found, when = f"open: {part.open or 'no card since it was written'}", ""
        else:
            machine = f"{run.date}, {run.card}, driver {run.driver}, {run.software}"
            machines += [machine] if machine not in machines else []
            figures = _figures(part, run)
            reason = "; ".join(
                filter(None, [run.note or run.status, figures and f"so far {figures}"])
            )
            done = "; ".join(filter(None, [figures, run.note]))
            found = done if run.status == "done" else f"open: {reason}"
            when = f"({machines.index(machine) + 1}) `{run.command}`"
        lines.append(f"| `{part.name}` | {part.question} | {found} | {when} |")
    told = [f"- ({number}) {machine}" for number, machine in enumerate(machines, 1)]
    return "\n".join([*lines, "", *told])


def _figures(part: Part, run: Run) -> str:
    told = []
    for name, value in run.figures.items():
        if name in part.targets or name == "tests_passed":
            target = part.targets.get(name, "")
            told.append(f"`{name}` {value:.4g}" + (f" (target {target})" if target else ""))
    return ", ".join(told)
