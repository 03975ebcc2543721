"""`headrace simulate`: plays a trace on simulated engines with one or more placement policies."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from headrace.cli import client, state
from headrace.cli.console import CliError, stderr, stdout
from headrace.simulate.best import capacity_rate
from headrace.simulate.calibrate import CalibrationError, calibrated
from headrace.simulate.catalog import policy_named
from headrace.simulate.hardware import Hardware
from headrace.simulate.outcome import Outcome, Targets
from headrace.simulate.report import ROWS, page
from headrace.simulate.run import (
    Failure,
    Run,
    Settings,
    SimulationError,
    simulate,
)
from headrace.simulate.trace import TraceError, in_blocks_of, multiply, read_trace

DOWN_S = 60.0
"""Time for which a failed engine is away."""


@dataclass(frozen=True, slots=True)
class Asked:
    """The options of the command."""

    trace: Path
    prefill: int
    decode: int
    policies: Sequence[str]
    load: float
    seconds: float
    seed: int
    calibrate: str | None
    store_tb: float | None
    ttft_s: float
    ttft_token_ms: float
    itl_ms: float
    failures: int


def run(asked: Asked, *, json_file: Path | None, report: Path | None) -> None:
    """Play the trace, print a table, and write the files that the options name.

    Raises:
        CliError: an option, the trace or the fits cannot be used.
    """
    if report is not None and report.suffix != ".html":
        raise CliError(f"--report writes HTML: {report} should end in .html", 2)
    try:
        runs, targets, facts = _play(asked)
    except (TraceError, SimulationError, CalibrationError, ValueError) as error:
        raise CliError(str(error), 2) from None
    outcomes = {name: one.outcome for name, one in runs.items()}
    stdout().print(_table(outcomes))
    if json_file is not None:
        told = {
            "asked": facts,
            "targets": asdict(targets),
            "policies": {name: asdict(outcome) for name, outcome in outcomes.items()},
        }
        _write(json_file, json.dumps(told, indent=2) + "\n")
    if report is not None:
        courses = {name: one.course for name, one in runs.items()}
        title = f"{asked.prefill} + {asked.decode} engines, {asked.trace.name}"
        _write(report, page(title, facts, outcomes, courses, targets))


def _play(asked: Asked) -> tuple[dict[str, Run], Targets, dict[str, str]]:
    hardware = _hardware(asked)
    targets = Targets(asked.ttft_s, asked.ttft_token_ms / 1e3, asked.itl_ms / 1e3)
    trace = in_blocks_of(read_trace(asked.trace), hardware.block_tokens)
    settings = Settings(seed=asked.seed, targets=targets, failures=_failures(asked))
    engines, warm_share = asked.prefill or asked.decode, settings.warm_share
    rate = asked.load * capacity_rate(trace, hardware, engines, asked.seconds, warm_share)
    work = multiply(trace, rate, asked.seconds, asked.seed)
    policies = {name: policy_named(name) for name in asked.policies}
    runs = {}
    with _bars(policies) as advance:
        for name, policy in policies.items():
            runs[name] = simulate(
                *(work, hardware, asked.prefill, asked.decode, policy, settings),
                progress=partial(advance, name),
            )
            advance(name, 1.0)
    facts = {
        "trace": f"{asked.trace.name}, {len(trace):,} requests in {trace.seconds:,.0f} s",
        "engines": f"{asked.prefill} prefill, {asked.decode} decode",
        "load": f"{asked.load:g}, {rate:.2f} times the trace's rate, {len(work):,} requests",
        "time": f"{asked.seconds:g} s, the first {settings.warm_share:.0%} not measured",
        "failures": str(asked.failures),
        "seed": str(asked.seed),
        "fits": asked.calibrate or "an 8B model on a GPU of the H100 kind, by arithmetic",
    }
    return runs, targets, facts


def _hardware(asked: Asked) -> Hardware:
    hardware = Hardware()
    if asked.calibrate is not None:
        hardware = calibrated(hardware, _fits(asked.calibrate))
    if asked.store_tb is not None:
        hardware = replace(hardware, store_bytes=asked.store_tb * 1e12)
    return hardware


def _fits(source: str) -> Any:
    """Return the JSON of a file, or of a running app's status."""
    try:
        if source.startswith(("http://", "https://")):
            endpoint, ours, path = source.rstrip("/").partition("/headrace/")
            app = state.Instance(endpoint, "", phase="--calibrate", endpoint=endpoint)
            return client.get_json(app, ours + path or "/headrace/v1/status")
        return json.loads(Path(source).read_text(encoding="utf-8"))
    except (OSError, ValueError, CliError) as error:
        raise CliError(f"--calibrate {source}: {error}", 2) from None


def _failures(asked: Asked) -> list[Failure]:
    """Return failures of random engines at random times of the measured part."""
    rng, engines = Random(asked.seed), asked.prefill + asked.decode
    if asked.failures and engines < 2:
        raise SimulationError("one engine alone cannot fail")
    return [
        Failure(asked.seconds * rng.uniform(0.3, 0.9), rng.randrange(engines), DOWN_S)
        for _ in range(asked.failures)
    ]


@contextmanager
def _bars(names: Any) -> Iterator[Any]:
    """Show a progress bar for each policy, on stderr."""
    columns = TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn()
    console = stderr()
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bars:
        tasks = {name: bars.add_task(name, total=1.0, start=False) for name in names}

        def advance(name: str, share: float) -> None:
            bars.start_task(tasks[name])
            bars.update(tasks[name], completed=share)

        yield advance


def _table(outcomes: dict[str, Outcome]) -> Table:
    table = Table("", *outcomes)
    for field, label, factor, unit in ROWS:
        cells = (f"{getattr(one, field) * factor:,.3g} {unit}".strip() for one in outcomes.values())
        if factor == 1.0 and not unit:
            cells = (f"{getattr(one, field):,}" for one in outcomes.values())
        table.add_row(label, *cells)
    return table


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise CliError(f"cannot write {path}: {error.strerror}") from None
    stderr().print(f"wrote {path}", markup=False)
