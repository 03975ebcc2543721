"""The ratios and plots of what was measured."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.blending import arms

BUDGETS = 0.10, 0.15, 0.30
OUR_BUDGETS = (0.05, *BUDGETS)
MAIN = 0.15
Row = dict[str, Any]


def figures(rows: list[Row]) -> dict[str, Any]:
    """Return the KL of each arm; the ratios, of all prompts with rows of ours and of the peers."""
    found: dict[str, Any] = {"prompts": len({row["prompt"] for row in rows}), "kl": {}}
    for arm in dict.fromkeys(row["arm"] for row in rows):
        budgets = sorted({row["budget"] for row in rows if row["arm"] == arm})
        found["kl"][arm] = {str(budget): mean(rows, arm, budget) for budget in budgets}
    needed = {(arm, budget) for arm in (arms.OURS, *arms.PEERS) for budget in BUDGETS}
    there: dict[str, set[tuple[str, float]]] = {}
    for row in rows:
        there.setdefault(row["prompt"], set()).add((row["arm"], row["budget"]))
    rows = [row for row in rows if needed <= there[row["prompt"]]]
    if not rows:
        return found
    for budget in BUDGETS:
        best = best_peer(rows, budget)
        ours = by_prompt(rows, arms.OURS, budget)
        peer = by_prompt(rows, best, budget)
        ratios = {name: kl / peer[name] for name, kl in ours.items()}
        found[f"{budget:.2f}"] = {
            "best_peer": best,
            "kl_vs_best_peer_rule": float(
                np.mean(list(ours.values())) / np.mean([peer[name] for name in ours])
            ),
            "worst": max(ratios.values()),
            "worst_prompt": max(ratios, key=lambda name: ratios[name]),
            "prompts_of_ours": len(ours),
            "question_free": mean(rows, arms.QUESTION_FREE, budget) / mean(rows, best, budget),
            "recompute_vs_best_peer_rule": recompute(rows, best, budget),
            "top1": {
                arm: float(np.mean([row["top1"] for row in chosen(rows, arm, budget)]))
                for arm in (arms.OURS, best)
            },
        }
    for key in ("place", "share"):
        for value in sorted({row[key] for row in rows}):
            some = [row for row in rows if row[key] == value]
            best = best_peer(some, MAIN)
            found[f"{key} {value}"] = mean(some, arms.OURS, MAIN) / mean(some, best, MAIN)
    return found


def chosen(rows: Iterable[Row], arm: str, budget: float) -> list[Row]:
    return [row for row in rows if row["arm"] == arm and row["budget"] == budget]


def by_prompt(rows: Iterable[Row], arm: str, budget: float) -> dict[str, float]:
    return {row["prompt"]: row["kl"] for row in chosen(rows, arm, budget)}


def mean(rows: Iterable[Row], arm: str, budget: float) -> float:
    found = list(by_prompt(rows, arm, budget).values())
    return float(np.mean(found)) if found else float("nan")


def best_peer(rows: list[Row], budget: float) -> str:
    return min(arms.PEERS, key=lambda arm: mean(rows, arm, budget))


def recompute(rows: list[Row], peer: str, budget: float) -> float:
    """Our budget at the peer's KL / the peer's budget, between measured ones in log scale."""
    target = mean(rows, peer, budget)
    curve = [(mean(rows, arms.OURS, each), each) for each in sorted(OUR_BUDGETS, reverse=True)]
    kls, budgets = zip(*[pair for pair in curve if np.isfinite(pair[0])], strict=True)
    return float(np.exp(np.interp(np.log(target), np.log(kls), np.log(budgets))) / budget)


def plots(rows: list[Row], folder: Path) -> None:
    """KL by budget, and which layers recompute how much."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    figure, axes = pyplot.subplots(figsize=(6, 4))
    for arm in (arms.OURS, arms.QUESTION_FREE, *arms.PEERS):
        budgets = sorted({row["budget"] for row in rows if row["arm"] == arm})
        axes.plot(budgets, [mean(rows, arm, each) for each in budgets], marker="o", label=arm)
    axes.set(xlabel="share of (token, layer) pairs recomputed", ylabel="KL, nats", yscale="log")
    axes.legend()
    figure.savefig(folder / "reuse_kl.png", dpi=120, bbox_inches="tight")
    figure, axes = pyplot.subplots(figsize=(6, 4))
    for arm in (arms.OURS, arms.QUESTION_FREE, "article", "V-L2", "EPIC"):
        layers = [row["by_layer"] for row in chosen(rows, arm, MAIN)]
        if layers:
            axes.plot(np.mean(layers, 0), label=arm)
    axes.set(xlabel="layer", ylabel=f"share of tokens recomputed, budget {MAIN:.0%}")
    axes.legend()
    figure.savefig(folder / "blending_layers.png", dpi=120, bbox_inches="tight")
