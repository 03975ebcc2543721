"""The figures of a benchmark: quantiles, and how they are printed and written."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def quantile(values: Sequence[float], q: float) -> float:
    """Return the `q` quantile by linear interpolation; NaN without values."""
    if not values:
        return math.nan
    ordered = sorted(values)
    at = q * (len(ordered) - 1)
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def show(figures: Mapping[str, float], file: Path | None) -> None:
    """Print a line for each figure; write them as JSON if a file is given."""
    for name, value in figures.items():
        print(f"{name} {value:.4g}")
    if file is not None:
        file.write_text(json.dumps({"figures": figures}, indent=2) + "\n")


def report(
    figures: Mapping[str, float],
    targets: Mapping[str, str],
    environment: Mapping[str, Any],
    file: Path | None,
) -> None:
    """Print a table of the figures beside their targets; write them as JSON if a file is given.

    Args:
        targets: such as `<= 0.5`, by figure.
        environment: as `environment.environment` returns it.
    """
    cpu, cores = environment["cpu"], environment["cores"]
    print(f"\n{environment['date']}, {cpu}, {cores} cores.\n")
    print("| figure | value | target |\n|---|---:|---:|")
    for name, value in figures.items():
        print(f"| `{name}` | {value:.4g} | {targets.get(name, '')} |")
    if file is not None:
        document = {"figures": figures, "targets": targets, "environment": environment}
        file.write_text(json.dumps(document, indent=1) + "\n")
