"""`headrace lab simulate`: plays a trace on simulated engines with some placement policies."""

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
from headrace_lab.simulate.best_case import capacity_rate
from headrace_lab.simulate.calibration import CalibrationError, calibrate_hardware
from headrace_lab.simulate.hardware import Hardware
from headrace_lab.simulate.html_report import ROWS, page
from headrace_lab.simulate.outcome import GoodputTargets, SimulationOutcome
from headrace_lab.simulate.policy_catalog import find_policy
from headrace_lab.simulate.run import (
    Failure,
    SimulationError,
    SimulationRun,
    SimulationSettings,
    simulate,
)
from headrace_lab.simulate.trace import (
    TraceError,
    read_trace,
    sample_trace,
    scale_trace,
    with_block_size,
)

DOWN_S = 60.0
"""Time for which a failed engine is away."""


@dataclass(frozen=True, slots=True)
class SimulateOptions:
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


def run(
    options: SimulateOptions, *, as_json: bool, output: Path | None, report: Path | None
) -> None:
    """Play the trace, print a table, and write the files that the options name.

    Raises:
        CliError: an option, the trace or the fits cannot be used.
    """
    if report is not None and report.suffix != ".html":
        raise CliError(f"--report writes HTML: {report} should end in .html", 2)
    try:
        runs, targets, facts = _play(options)
    except (TraceError, SimulationError, CalibrationError, ValueError) as error:
        raise CliError(str(error), 2) from None
    outcomes = {name: one.outcome for name, one in runs.items()}
    figures = {
        "options": facts,
        "targets": asdict(targets),
        "policies": {name: asdict(outcome) for name, outcome in outcomes.items()},
    }
    if as_json:
        print(json.dumps(figures, indent=2))
    else:
        stdout().print(_table(outcomes))
    if output is not None:
        _write(output, json.dumps(figures, indent=2) + "\n")
    if report is not None:
        title = f"{options.prefill} + {options.decode} engines, {options.trace.name}"
        _write(report, page(title, facts, runs, targets))


def _play(
    options: SimulateOptions,
) -> tuple[dict[str, SimulationRun], GoodputTargets, dict[str, str]]:
    policies = {name: find_policy(name) for name in options.policies}
    hardware = _hardware(options)
    targets = GoodputTargets(options.ttft_s, options.ttft_token_ms / 1e3, options.itl_ms / 1e3)
    trace = with_block_size(read_trace(_trace(options.trace)), hardware.block_tokens)
    settings = SimulationSettings(seed=options.seed, targets=targets, failures=_failures(options))
    engines, warm_share = options.prefill or options.decode, settings.warm_share
    rate = options.load * capacity_rate(trace, hardware, engines, options.seconds, warm_share)
    work = scale_trace(trace, rate, options.seconds, options.seed)
    runs = {}
    with _bars(policies) as advance:
        for name, policy in policies.items():
            runs[name] = simulate(
                *(work, hardware, options.prefill, options.decode, policy, settings),
                progress=partial(advance, name),
            )
            advance(name, 1.0)
    facts = {
        "trace": f"{options.trace.name}, {len(trace):,} requests in {trace.seconds:,.0f} s",
        "engines": f"{options.prefill} prefill, {options.decode} decode",
        "load": f"{options.load:g}, {rate:.2f} times the trace's rate, {len(work):,} requests",
        "time": f"{options.seconds:g} s, the first {settings.warm_share:.0%} not measured",
        "failures": str(options.failures),
        "seed": str(options.seed),
        "fits": options.calibrate or "an 8B model on a GPU of the H100 kind, by arithmetic",
    }
    return runs, targets, facts


def _trace(path: Path) -> Path:
    """Return the file of a trace; `sample` is Headrace's own, unless there is a file so called."""
    return sample_trace() if path == Path("sample") and not path.exists() else path


def _hardware(options: SimulateOptions) -> Hardware:
    hardware = Hardware()
    if options.calibrate is not None:
        hardware = calibrate_hardware(hardware, _fits(options.calibrate))
    if options.store_tb is not None:
        hardware = replace(hardware, store_bytes=options.store_tb * 1e12)
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


def _failures(options: SimulateOptions) -> list[Failure]:
    """Return failures of random engines at random times of the measured part."""
    rng, engines = Random(options.seed), options.prefill + options.decode
    if options.failures and engines < 2:
        raise SimulationError("one engine alone cannot fail")
    return [
        Failure(options.seconds * rng.uniform(0.3, 0.9), rng.randrange(engines), DOWN_S)
        for _ in range(options.failures)
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


def _table(outcomes: dict[str, SimulationOutcome]) -> Table:
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
