"""The ratios of what was measured, and a row of each arm."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from benchmarks.longcontext.arms import MAIN_SHARE, OURS, SHARES
from benchmarks.longcontext.judge import Row

PEER = "kvpress "


def figures(rows: Sequence[Row]) -> dict[str, Any]:
    """Only of contexts that all arms of kvpress and ours were measured on."""
    both = {row["text"] for row in rows if row["arm"] == OURS}
    both &= {row["text"] for row in rows if row["arm"].startswith(PEER)}
    some = [row for row in rows if row["text"] in both]
    arms: dict[str, list[Row]] = {}
    for row in some:
        arms.setdefault(f"{row['arm']} at {row['share']:.0%}", []).append(row)
    found: dict[str, Any] = {"texts": len(both)}
    for share in SHARES:
        at = f" at {share:.0%}"
        mean = {
            name.removesuffix(at): _mean(one, "kl")
            for name, one in arms.items()
            if name.endswith(at)
        }
        presses = [name for name in mean if name.startswith(PEER)]
        if not presses or OURS not in mean:
            continue
        best = min(presses, key=lambda name: mean[name])
        place = f"best_kvpress_at_{round(share * 100)}pct"
        found |= {f"kl_vs_{place}": mean[OURS] / mean[best], place: best}
        if share == MAIN_SHARE:
            by_text = {
                one: _kl(some, OURS, share, one) / min(_kl(some, p, share, one) for p in presses)
                for one in sorted(both)
            }
            found["kl_vs_each_texts_own_best_kvpress"] = by_text
    found["arms"] = {name: _arm(one) for name, one in arms.items()}
    return found


def _arm(rows: list[Row]) -> dict[str, Any]:
    kinds = dict.fromkeys(row["kind"] for row in rows)
    depths: dict[str, list[int]] = {}
    first = [0, 0]
    for row in rows:
        for depth, (right, known) in row["facts"].items():
            place = first if row["kind"] == "turns" else depths.setdefault(_third(depth), [0, 0])
            place[0] += right
            place[1] += known
    return {
        "kept": _mean(rows, "kept"),
        "kl": _mean(rows, "kl"),
        "kl_by_kind": {
            kind: _mean([row for row in rows if row["kind"] == kind], "kl") for kind in kinds
        },
        "top1": _mean(rows, "top1"),
        "perplexity_vs_exact": math.exp(_mean(rows, "log_perplexity_over_exact")),
        "facts_recalled_by_depth": {depth: _share(*depths[depth]) for depth in sorted(depths)},
        "first_sentence_recalled": _share(*first),
        "texts": len(rows),
    }


def _third(depth: str) -> str:
    return ("first third", "middle third", "last third")[min(2, int(float(depth) * 3))]


def _share(right: int, known: int) -> float | None:
    """Return the share of right tokens among those that the exact model gets right."""
    return right / known if known else None


def _kl(rows: Sequence[Row], arm: str, share: float, text: str) -> float:
    found = [r["kl"] for r in rows if (r["arm"], r["share"], r["text"]) == (arm, share, text)]
    return float(found[0])


def _mean(rows: Sequence[Row], name: str) -> float:
    return sum(row[name] for row in rows) / len(rows)
