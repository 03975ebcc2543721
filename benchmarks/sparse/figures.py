"""The ratios and plots of what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.sparse.arms import BEST, OURS, OWN, SHARE, SHARES
from headrace_lab.sparse.baselines import BASELINES

Row = dict[str, Any]


def figures(rows: Sequence[Row]) -> dict[str, Any]:
    """Return the ratios, and what each arm reached."""
    names = list(dict.fromkeys(row["arm"] for row in rows))
    by = {name: {row["text"]: row for row in rows if row["arm"] == name} for name in names}
    found: dict[str, Any] = {"texts": len({row["text"] for row in rows})}
    mean = {name: _mean(by[name].values(), "kl") for name in names}
    recall = {name: _mean(by[name].values(), "recall") for name in (OURS, "mean", BEST)}
    best = min(BASELINES, key=lambda name: mean[name])
    ratios = {
        one: row["kl"] / min(by[name][one]["kl"] for name in BASELINES)
        for one, row in by[OURS].items()
    }
    against_best = {one: row["kl"] / by[best][one]["kl"] for one, row in by[OURS].items()}
    worst = max(against_best, key=lambda one: against_best[one])
    found |= {
        "recall_gap_closed": (recall[OURS] - recall["mean"]) / (recall[BEST] - recall["mean"]),
        "best_baseline": best,
        "kl_at_10pct_vs_best_baseline": mean[OURS] / mean[best],
        "kl_at_10pct_vs_best_baseline_worst_text": against_best[worst],
        "worst_text": worst,
        "kl_vs_each_texts_own_best_baseline_median": float(np.median(list(ratios.values()))),
        "kl_vs_each_texts_own_best_baseline_worst": max(ratios.values()),
        "kl_vs_oracle": mean[OURS] / mean[BEST],
        "recall_tasks_vs_dense": _tasks(by[OURS].values()),
        "bytes_vs_k": next(iter(by[OURS].values()))["bytes_vs_k"],
    }
    found["arms"] = {name: _arm(list(by[name].values()), by[OURS]) for name in names}
    return found


def _arm(rows: list[Row], ours: dict[str, Row]) -> dict[str, Any]:
    kinds = dict.fromkeys(row["kind"] for row in rows)
    same = [ours[row["text"]] for row in rows]
    return {
        "bytes_vs_k": rows[0]["bytes_vs_k"],
        **{
            name: _mean(rows, name)
            for name in ("chosen", "recall", "kl", "top1")
            if rows[0][name] is not None
        },
        "texts": len(rows),
        "kl_vs_ours": _mean(rows, "kl") / _mean(same, "kl"),
        "recall_tasks_vs_dense": _tasks(rows),
        "kl_by_kind": {
            kind: _mean([row for row in rows if row["kind"] == kind], "kl") for kind in kinds
        },
    }


def _mean(rows: Any, name: str) -> float:
    return float(np.mean([row[name] for row in rows]))


def _tasks(rows: Any) -> float:
    """Return the share of answers that stay right, among those that the exact model gets right."""
    rows = list(rows)
    answers = sum(row["answers"] for row in rows)
    return sum(row["answered"] for row in rows) / answers if answers else float("nan")


def plots(found: dict[str, Any], folder: Path) -> None:
    """KL by share of pages."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    figure, axes = pyplot.subplots(figsize=(6, 4))
    for name in (OURS, OWN, "mean", BEST):
        points = [(SHARE, found["arms"][name]["kl"])]
        points += [
            (share, found["arms"][f"{name}, {share:.0%}"]["kl"])
            for share in SHARES
            if f"{name}, {share:.0%}" in found["arms"]
        ]
        axes.plot(*zip(*sorted(points), strict=True), marker="o", label=name)
    for name in BASELINES:
        if name != "mean":
            axes.plot([SHARE], [found["arms"][name]["kl"]], "x", label=name)
    axes.set(xlabel="share of pages attended to", ylabel="KL, nats", yscale="log")
    axes.legend()
    figure.savefig(folder / "sparse_kl.png", dpi=120, bbox_inches="tight")
    pyplot.close(figure)
