"""Tokens per second of arms that took turns, as ratios and as a table. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

Slices = Mapping[str, Sequence[Mapping[str, float]]]
"""Arm -> its slices, each with `tokens`, `seconds` and `steps`."""

PEERS = ("ngram", "suffix")
NOISY = "_noisy"
"""Suffix of a workload's name for runs with busy neighbours."""


def rate(slices: Sequence[Mapping[str, float]]) -> float:
    """Return the tokens per second over all slices."""
    return sum(s["tokens"] for s in slices) / sum(s["seconds"] for s in slices)


def figures(workload: str, concurrency: int, slices: Slices) -> dict[str, float]:
    """Return the figures of one cell, `W.cC.*`; what lacks an arm is left out."""
    at = f"{workload}.c{concurrency}"
    rates = {arm: rate(taken) for arm, taken in slices.items()}
    found = {f"{at}.{arm}.tok_s": value for arm, value in rates.items()}
    auto = rates.get("auto")
    if auto is None:
        return found
    static = {arm: value for arm, value in rates.items() if arm.startswith("static")}
    against = {
        "none": rates.get("plain"),
        "none_same_engine": rates.get("off"),
        **{peer: rates.get(peer) for peer in PEERS},
    }
    if static and "off" in rates:
        against["best_static_k"] = max(*static.values(), rates["off"])
    for name, value in against.items():
        if value is not None:
            found[f"{at}.tok_s_vs_{name}"] = auto / value
    taken = slices["auto"]
    found[f"{at}.tokens_per_row_step"] = sum(s["tokens"] for s in taken) / (
        concurrency * sum(s["steps"] for s in taken)
    )
    if "off" in slices:
        pairs = zip(slices["auto"], slices["off"], strict=True)
        ratios = sorted(rate([one]) / rate([other]) for one, other in pairs)
        if len(ratios) > 1:
            low, _, high = statistics.quantiles(ratios, n=4)
            found[f"{at}.tok_s_vs_none_same_engine.low_quartile"] = low
            found[f"{at}.tok_s_vs_none_same_engine.high_quartile"] = high
    return found


def target(name: str) -> float | None:
    """Return the minimum target of a figure; None if it has none."""
    workload, _, rest = name.partition(".c")
    concurrency, _, figure = rest.partition(".")
    if figure == "tok_s_vs_best_static_k":
        return 0.95
    if figure in ("tok_s_vs_ngram", "tok_s_vs_suffix"):
        return 1.0
    if figure in ("tok_s_vs_none", "tok_s_vs_none_same_engine"):
        if workload.endswith(NOISY):
            return 0.95
        if workload == "draftable":
            return {1: 1.7, 8: 1.2, 64: 1.0}.get(int(concurrency), 0.97)
        return 0.97
    return None


def table(found: Mapping[str, float]) -> str:
    """Return Markdown: a row a cell; what misses its target is bold."""
    columns = ("none", "none_same_engine", "best_static_k", *PEERS)
    lines = [
        "| workload | at once | tok/s | tokens a row and step | "
        + " | ".join(f"vs {column.replace('_', ' ')}" for column in columns)
        + " |",
        "|---|---:|---:|---:|" + "---:|" * len(columns),
    ]
    cells = sorted(
        {(n.split(".c")[0], int(n.split(".c")[1].split(".")[0])) for n in found if ".c" in n}
    )
    for workload, concurrency in cells:
        at = f"{workload}.c{concurrency}"
        row = [workload, str(concurrency)]
        row.append(f"{found.get(f'{at}.auto.tok_s', float('nan')):.1f}")
        row.append(f"{found.get(f'{at}.tokens_per_row_step', float('nan')):.2f}")
        for column in columns:
            name = f"{at}.tok_s_vs_{column}"
            if name not in found:
                row.append("")
                continue
            least = target(name)
            missed = least is not None and found[name] < least
            row.append(f"**{found[name]:.2f}**" if missed else f"{found[name]:.2f}")
        lines.append("| " + " | ".join(row) + " |")
    return "\n".join(lines)
