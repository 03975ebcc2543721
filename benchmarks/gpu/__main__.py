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
    state = results.read(options.resume)
    if options.list:
        print(results.table(PARTS, state))
        return
    parts = [BY_NAME[name] for name in options.only] or results.order(PARTS, state, _commit())
    parts = [part for part in parts if not part.open]
    if options.dry:
        raise SystemExit(_dry_run([BY_NAME[name] for name in options.only] or PARTS, options.logs))
    import torch

    if not torch.cuda.is_available():
        raise SystemExit("there is no GPU; --dry runs the parts on a CPU, --list prints the list")
    _run(parts, state, options)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu")
    parser.add_argument(
        *("--resume",), type=Path, metavar="FILE", default=STATE, help="state; default: %(default)s"
    )
    parser.add_argument("--only", type=_names, default=[], metavar="PART,...", help="these parts")
    parser.add_argument(
        *("--within",),
        type=float,
        default=float("inf"),
        metavar="SECONDS",
        help="begin no part whose limit would be after these",
    )
    parser.add_argument("--logs", type=Path, metavar="FOLDER", help="gets each part's output")
    parser.add_argument("--list", action="store_true", help="print the list")
    parser.add_argument("--dry", action="store_true", help="on a CPU, with tiny shapes")
    parser.add_argument("--part", choices=BY_NAME, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.logs is None:
        options.logs = Path(tempfile.mkdtemp(prefix="headrace-gpu-logs-"))
    options.logs.mkdir(parents=True, exist_ok=True)
    return options


def _names(text: str) -> list[str]:
    """Return part names. Raises ArgumentTypeError for an unknown one."""
    names = text.split(",")
    for name in names:
        if name not in BY_NAME:
            raise argparse.ArgumentTypeError(f"{name} is none of {', '.join(BY_NAME)}")
    return names


def _run(parts: list[Part], state: results.Results, options: argparse.Namespace) -> None:
    """Run parts while they fit into the time, and keep what they find."""
    ends_s = time.monotonic() + options.within
    card, driver = _card()
    for part in parts:
        if time.monotonic() + part.limit_s > ends_s:
            print(f"{part.name}: left for the next call, its limit is {part.limit_s} s", flush=True)
            continue
        outcome = process.run(part, options.logs / f"{part.name}.log")
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
        results.write(options.resume, state)
        _tell(part, outcome)


def _dry_run(parts: list[Part] | tuple[Part, ...], logs: Path) -> int:
    """Run parts on a CPU; return 1 if one fails."""
    failed = 0
    for part in parts:
        if part.open:
            continue
        outcome = process.run(part, logs / f"{part.name}.log", dry=True)
        _tell(part, outcome)
        failed += outcome.status != "done"
        if outcome.status != "done":
            print(f"see {logs / part.name}.log", flush=True)
    return int(failed > 0)


def _tell(part: Part, outcome: process.Outcome) -> None:
    told = ", ".join(f"{name} {value:.4g}" for name, value in outcome.figures.items())
    note = f": {outcome.note}" if outcome.note else ""
    print(f"{part.name}: {outcome.status} in {outcome.seconds:.0f} s{note}; {told}", flush=True)
    if outcome.status == "done" and not part.tests:
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
