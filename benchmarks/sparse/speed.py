"""Cost of choosing units and attending to them, against dense attention, on one core.

    speed.LENGTH.UNIT.attention_us_vs_dense  (score + choose + gathered attention) / dense attention
                                             of one query of a layer; the median of turns
    speed.LENGTH.UNIT.score_us_per_head      and choose_us, gathered_us, dense_us of the layer
    speed.UNIT.summarise_us                  of a unit and head

Keys and values lie as an engine's CPU cache holds them, a KV head after the other, in fp32. Dense
attention is torch's over all of them, gathered attention torch's over copies of chosen units. Both
have 3 KV heads with 3 query heads each, of 64 dimensions, as SmolLM2-135M; 10 % of the units are
chosen.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from headrace_decode.sparse.choosing import choose
from headrace_decode.sparse.scoring import score
from headrace_decode.sparse.summaries import Summaries

LENGTHS, UNITS = (8192, 32768), (16, 32)
HEADS, GROUP, DIM, SHARE = 3, 3, 64, 0.1
TURNS = 60


def measured() -> dict[str, object]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    found: dict[str, object] = {}
    for length in LENGTHS:
        for unit in UNITS:
            found |= _one(length, unit)
    return found


def _one(length: int, unit: int) -> dict[str, object]:
    count = length // unit
    # Units around means of their own, as keys are.
    keys = torch.randn(HEADS, count, unit, DIM) + 2 * torch.randn(HEADS, count, 1, DIM)
    values, queries = torch.randn(HEADS, count, unit, DIM), torch.randn(HEADS, GROUP, DIM)
    summaries, units = Summaries(count, HEADS, unit, DIM), np.arange(count)
    by_unit = keys.transpose(0, 1).contiguous().numpy()
    asked, scale = queries.numpy(), DIM**-0.5
    scores = score(summaries, units, asked, scale)
    wanted = round(SHARE * count)
    chosen = torch.from_numpy(choose(scores, wanted, 1, 2))
    heads = torch.arange(HEADS)[:, None]

    def dense() -> None:
        scaled_dot_product_attention(queries, keys.flatten(1, 2), values.flatten(1, 2))

    def gathered() -> None:
        k, v = (one[heads, chosen].flatten(1, 2) for one in (keys, values))
        scaled_dot_product_attention(queries, k, v)

    us = {
        "summarise": _us(lambda: summaries.put(units, by_unit), 5),
        **_by_turns(
            {
                "dense": dense,
                "score": lambda: score(summaries, units, asked, scale),
                "choose": lambda: choose(scores, wanted, 1, 2),
                "gathered": gathered,
            }
        ),
    }
    sparse = us["score"] + us["choose"] + us["gathered"]
    name = f"speed.{length}.{unit}"
    return {
        f"{name}.attention_us_vs_dense": sparse / us["dense"],
        f"{name}.score_us_per_head": us["score"] / HEADS,
        **{f"{name}.{each}_us": us[each] for each in ("dense", "choose", "gathered")},
        f"speed.{unit}.summarise_us": us["summarise"] / count / HEADS,
    }


def _by_turns(calls: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Medians, so that a slower moment meets all of them."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(TURNS):
        for name, call in calls.items():
            found[name].append(_us(call, 3))
    return {name: statistics.median(each) for name, each in found.items()}


def _us(call: Callable[[], object], times: int) -> float:
    """Return the median of so many calls."""
    taken = []
    for _ in range(times):
        begun = time.perf_counter()
        call()
        taken.append(time.perf_counter() - begun)
    return statistics.median(taken) * 1e6
