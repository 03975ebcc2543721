"""Cost of choosing pages and attending to them, against dense attention, on one core.

    speed.LENGTH.PAGE.attention_us_vs_dense  (scores + selection + gathered attention)   /
                                             dense attention of one query of a layer; the median of
                                             turns
    speed.LENGTH.PAGE.score_us_per_head      and choose_us, gathered_us, dense_us of the layer
    speed.PAGE.summarise_us                  of a page and head

Keys and values lie as an engine's CPU cache holds them, a KV head after the other, in fp32. Dense
attention is torch's over all of them, gathered attention torch's over copies of chosen pages. Both
have 3 KV heads with 3 query heads each, of 64 dimensions, as SmolLM2-135M; 10 % of the pages are
chosen.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from headrace_decode.sparse.page_scores import score_pages
from headrace_decode.sparse.page_selection import select_pages
from headrace_decode.sparse.summaries import Summaries

LENGTHS, PAGES = (8192, 32768), (16, 32)
HEADS, GROUP, DIM, SHARE = 3, 3, 64, 0.1
TURNS = 60


def measured() -> dict[str, object]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    found: dict[str, object] = {}
    for length in LENGTHS:
        for page in PAGES:
            found |= _one(length, page)
    return found


def _one(length: int, page: int) -> dict[str, object]:
    count = length // page
    # Pages around means of their own, as keys are.
    keys = torch.randn(HEADS, count, page, DIM) + 2 * torch.randn(HEADS, count, 1, DIM)
    values, queries = torch.randn(HEADS, count, page, DIM), torch.randn(HEADS, GROUP, DIM)
    summaries, pages = Summaries(count, HEADS, page, DIM), np.arange(count)
    by_page = keys.transpose(0, 1).contiguous().numpy()
    asked, scale = queries.numpy(), DIM**-0.5
    scores = score_pages(summaries, pages, asked, scale)
    wanted = round(SHARE * count)
    chosen = torch.from_numpy(select_pages(scores, wanted, 1, 2))
    heads = torch.arange(HEADS)[:, None]

    def dense() -> None:
        scaled_dot_product_attention(queries, keys.flatten(1, 2), values.flatten(1, 2))

    def gathered() -> None:
        k, v = (one[heads, chosen].flatten(1, 2) for one in (keys, values))
        scaled_dot_product_attention(queries, k, v)

    us = {
        "summarise": _us(lambda: summaries.put(pages, by_page), 5),
        **_by_turns(
            {
                "dense": dense,
                "score_pages": lambda: score_pages(summaries, pages, asked, scale),
                "select_pages": lambda: select_pages(scores, wanted, 1, 2),
                "gathered": gathered,
            }
        ),
    }
    sparse = us["score_pages"] + us["select_pages"] + us["gathered"]
    name = f"speed.{length}.{page}"
    return {
        f"{name}.attention_us_vs_dense": sparse / us["dense"],
        f"{name}.score_us_per_head": us["score_pages"] / HEADS,
        **{f"{name}.{each}_us": us[each] for each in ("dense", "select_pages", "gathered")},
        f"speed.{page}.summarise_us": us["summarise"] / count / HEADS,
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
