"""Figures as a table, with their targets. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from benchmarks.kvstore.timing import Figures

TARGETS = {
    "dram.load_vs_memcpy": (">=", 0.65),
    "dram.load_unverified_vs_memcpy": (">=", 0.9),
    "dram.save_vs_memcpy": (">=", 0.6),
    "nvme.load_vs_raw": (">=", 0.9),
    "remote.load_vs_raw": (">=", 0.9),
    "mooncake.get_ratio": (">=", 1.5),
    "mooncake.put_ratio": (">=", 1.5),
    "ttft.dram_vs_cold": ("<=", 0.12),
    "ttft.nvme_vs_cold": ("<=", 0.2),
    "overlap.total_vs_max": ("<=", 1.15),
    "idle.step_overhead": ("<=", 1.01),
    "save.itl_p99_vs_off": ("<=", 1.05),
}


def reached(name: str, value: float) -> bool | None:
    """Return whether a figure meets its target; None if it has none."""
    if name not in TARGETS:
        return None
    sign, target = TARGETS[name]
    return value >= target if sign == ">=" else value <= target


def table(figures: Figures) -> str:
    """Return Markdown: every figure, the quartiles of medians, and the targets."""
    lines = ["| figure | value | quartiles | target |", "|---|---:|---:|---:|"]
    for name, value in figures.values.items():
        low, high = figures.quartiles.get(name, (math.nan, math.nan))
        spread = "" if math.isnan(low) else f"{_number(low)} to {_number(high)}"
        asked = ""
        if name in TARGETS:
            sign, target = TARGETS[name]
            asked = f"{sign} {target:g}" + ("" if reached(name, value) else " **missed**")
        lines.append(f"| `{name}` | {_number(value)} | {spread} | {asked} |")
    lines += ["", *(f"- {part}: {text}." for part, text in figures.notes.items())]
    return "\n".join(lines)


def document(
    figures: Figures, environment: Mapping[str, Any], failure: str | None
) -> dict[str, Any]:
    """Return the content of the JSON file; NaN, which JSON does not have, becomes null."""
    return {
        "figures": {n: None if math.isnan(v) else v for n, v in figures.values.items()},
        "quartiles": figures.quartiles,
        "notes": figures.notes,
        "environment": dict(environment),
        "failure": failure,
    }


def _number(value: float) -> str:
    if math.isnan(value):
        return "none"
    return f"{value:.3f}" if abs(value) < 10 else f"{value:.1f}"
