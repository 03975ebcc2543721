"""The figures of a benchmark, as it prints and writes them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


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
