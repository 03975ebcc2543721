"""Everything that needs a GPU, in order of worth.

    python -m benchmarks.gpu --resume benchmarks/gpu/state.json --within 540

runs the parts that have not ended yet (`parts.PARTS`), each in a process of its own with a limit,
and writes FILE after each. The next call continues. Needs one NVIDIA card of 80 GB and
`headrace[gpu]`. `--dry` runs each part with tiny shapes on a CPU, as far as it can there, and
writes no state. `--list` prints the list with what was found.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.gpu import process, results
from benchmarks.gpu.parts import BY_NAME, PARTS, Part

STATE = Path(__file__).with_name("state.json")


def main() -> None:
    options = _options()
    if options.part:
        _be_part(BY_NAME[options.part], options.out, options.dry)
        return
    try:
        state = results.read(options.resume)
    except ValueError as error:
        raise SystemExit(f"error: --resume: {error}") from error
    if options.list:
        print(results.table(PARTS, state))
        return
    chosen = [BY_NAME[name] for name in options.only]
    for part in chosen:
        if part.open:
            raise SystemExit(f"error: --only: {part.name} cannot run: {part.open}")
    logs = options.logs or Path(tempfile.mkdtemp(prefix="headrace-gpu-logs-"))
    logs.mkdir(parents=True, exist_ok=True)
    if options.dry:
        raise SystemExit(_dry_run(chosen or [part for part in PARTS if not part.open], logs))
    import torch

    if not torch.cuda.is_available():
        raise SystemExit("there is no GPU; --dry runs the parts on a CPU, --list prints the list")
    try:
        results.write(options.resume, state)  # before the card's minutes are spent
    except OSError as error:
        raise SystemExit(f"error: --resume: {error}") from error
    parts = chosen or results.order(PARTS, state, _commit())
    _run(parts, state, options.resume, options.within, logs)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu")
    add = parser.add_argument
    add("--resume", type=Path, metavar="FILE", default=STATE, help="state; default: %(default)s")
    add("--only", type=_names, default=[], metavar="PART,...", help="these parts")
    within = "begin no part whose limit would be after these"
    add("--within", type=float, default=float("inf"), metavar="SECONDS", help=within)
    add("--logs", type=Path, metavar="FOLDER", help="gets each part's output")
    add("--list", action="store_true", help="print the list")
    add("--dry", action="store_true", help="on a CPU, with tiny shapes")
    add("--part", choices=BY_NAME, help=argparse.SUPPRESS)
    add("--out", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def _names(text: str) -> list[str]:
    """Return part names. Raises ArgumentTypeError for an unknown one."""
    names = text.split(",")
    for name in names:
        if name not in BY_NAME:
            raise argparse.ArgumentTypeError(f"{name} is none of {', '.join(BY_NAME)}")
    return names


def _run(
    parts: Iterable[Part], state: results.Results, file: Path, within_s: float, logs: Path
) -> None:
    """Run parts while they fit into the time, and keep what they find in a file."""
    ends_s = time.monotonic() + within_s
    card, driver = _card()
    for part in parts:
        if time.monotonic() + part.limit_s > ends_s:
            print(f"{part.name}: left for the next call, its limit is {part.limit_s} s", flush=True)
            continue
        outcome = process.run(part, log := logs / f"{part.name}.log")
        state.runs[part.name] = results.Run(
            status=outcome.status,
            date=datetime.date.today().isoformat(),
            card=card,
            driver=driver,
            software=_software(),
            commit=_commit(),
            command=f"python -m benchmarks.gpu --only {part.name}",
            seconds=round(outcome.seconds, 1),
            figures=outcome.figures,
            found=outcome.found,
            note=outcome.note,
        )
        results.write(file, state)
        _print(part, outcome, log)


def _dry_run(parts: Iterable[Part], logs: Path) -> int:
    """Run parts on a CPU; return 1 if one fails."""
    failed = False
    for part in parts:
        outcome = process.run(part, log := logs / f"{part.name}.log", dry=True)
        _print(part, outcome, log)
        failed |= outcome.status != "done"
    return int(failed)


def _print(part: Part, outcome: process.Outcome, log: Path) -> None:
    """Print what a part has found; where its output is, if it did not end."""
    told = ", ".join(f"{name} {value:.4g}" for name, value in outcome.figures.items())
    note = f": {outcome.note}" if outcome.note else ""
    print(f"{part.name}: {outcome.status} in {outcome.seconds:.0f} s{note}; {told}", flush=True)
    if outcome.status != "done":
        print(f"see {log}", flush=True)
    elif not part.tests:
        print(process.module(part).markdown(outcome.found) + "\n", flush=True)


def _be_part(part: Part, out: Path, dry: bool) -> None:
    """Measure in this process; `out` has what was found, also before the end."""
    if dry and part.interpreted:
        from tests.support.seen_triton import have_vllm_see_triton

        have_vllm_see_triton()

    def report(found: dict[str, Any]) -> None:
        beside = out.with_suffix(".new")
        beside.write_text(json.dumps(found))
        os.replace(beside, out)

    report(process.module(part).measured(dry, report))
    sys.stdout.flush()


def _card() -> tuple[str, str]:
    """Return the card's name and its driver's version."""
    asked = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    line = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.split("\n")[0]
    name, _, driver = line.partition(", ")
    return name, driver


def _software() -> str:
    import torch

    versions = [f"torch {torch.__version__}", f"CUDA {torch.version.cuda}"]
    for name in ("triton", "vllm", "nixl"):
        try:
            versions.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            versions.append(f"no {name}")
    return ", ".join(versions)


def _commit() -> str:
    """Return the repository's commit; nothing outside of a repository."""
    asked = ["git", "rev-parse", "--short=12", "HEAD"]
    try:
        done = subprocess.run(asked, cwd=process.ROOT, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return ""
    return done.stdout.strip()


if __name__ == "__main__":
    main()
