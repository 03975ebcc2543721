"""Estimate of the gain and loss of a coarse level over blocks of 128 tokens, before it is built.

    python -m benchmarks.sparse.levels --json FILE [--texts N]

With two levels, a cheap rule would score blocks first. Then, by their summaries, only the
pages of the best blocks would be scored: of as many blocks as hold three times the pages that are
chosen.

    levels.scores_share.K.U  share of the time of a layer's sparse attention in the engine's backend
                             that scores all pages
    levels.ceiling.K.U       that time over the rest if three tenths of the pages are scored and the
                             coarse level costs nothing
    levels.mass.RULE         share of the exact model's attention that falls on chosen pages of 16,
                             mean of the texts for tuning, heads and layers; `one level` beside

K is the length of KV, U a page with a basis. Calls are timed in turns, on one thread. Rules use
exact numbers; a real coarse level would round them.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.plain import model
from benchmarks.sparse.arms import TENTH, kept
from benchmarks.sparse.attention import Layer
from benchmarks.sparse.engine import SHAPE, Pair, times_us
from benchmarks.sparse.measure import learned
from benchmarks.sparse.texts import KINDS, TAIL_TOKENS, text
from headrace_decode.sparse.page_scores import score_pages
from headrace_lab.sparse.baselines import quest

KV_TOKENS, PAGES, BLOCK_TOKENS = (8192, 32768, 131072), (16, 32), 128
CANDIDATES = 3


def times() -> dict[str, float]:
    found = {}
    for tokens in KV_TOKENS:
        for page in PAGES:
            whole_us, all_us, part_us = _times_us(Pair(tokens, page, basis=True), page)
            found[f"levels.scores_share.{tokens}.{page}"] = all_us / whole_us
            found[f"levels.ceiling.{tokens}.{page}"] = whole_us / (whole_us - all_us + part_us)
    return found


def _times_us(pair: Pair, page: int) -> list[float]:
    """A layer's sparse attention; the scores of all pages; those of three tenths, by blocks."""
    metadata: Any = pair.metadata()
    impl: Any = pair.ours.impl
    summaries, query = impl.sparse.summaries, pair.request.queries
    [row] = metadata.sparse.rows
    queries = query[0].float().view(SHAPE.kv_heads, -1, SHAPE.head_dim).numpy()
    per = BLOCK_TOKENS // page
    blocks = row.pages[: len(row.pages) // per * per].reshape(-1, per)
    few = np.arange(0, len(blocks), 10)[:, None] + np.arange(CANDIDATES)
    part = np.ascontiguousarray(blocks[few[few < len(blocks)]].ravel())
    return times_us(
        [
            lambda: pair.ours.forward(query, metadata),
            lambda: score_pages(summaries, row.pages, queries, SHAPE.scale),
            lambda: score_pages(summaries, part, queries, SHAPE.scale),
        ]
    )


Coarse = Callable[[Layer], Tensor]
"""Logits of blocks: fp32 [H, r * G, blocks]."""


def _blocks(layer: Layer) -> Tensor:
    """Return the keys of blocks, padded in the last one: [H, blocks, pages, T, D]."""
    per = BLOCK_TOKENS // layer.page_tokens
    lacking = -layer.keys.shape[1] % per
    last = layer.keys[:, -1:].expand(-1, lacking, -1, -1)
    return torch.cat([layer.keys, last], 1).unflatten(1, (-1, per))


def _asked(layer: Layer) -> Tensor:
    return layer.queries.flatten(1, 2)


def of_block_means(layer: Layer) -> Tensor:
    return _asked(layer) @ _blocks(layer).mean((2, 3)).mT


def of_bounds(layer: Layer) -> Tensor:
    return quest(_blocks(layer).flatten(2, 3), _asked(layer))


def of_page_means(layer: Layer) -> Tensor:
    means = _blocks(layer).mean(3)
    return torch.einsum("hqd,hbud->hqbu", _asked(layer), means).logsumexp(-1)


def of_attention(layer: Layer) -> Tensor:
    """Return the best that any coarse level could do."""
    return torch.einsum("hqd,hbutd->hqbut", _asked(layer), _blocks(layer)).logsumexp((-2, -1))


BOUNDS = "least and largest"
COARSE: dict[str, tuple[Coarse, int]] = {
    "block means": (of_block_means, CANDIDATES),
    BOUNDS: (of_bounds, CANDIDATES),
    f"{BOUNDS}, five times": (of_bounds, 5),
    "page means": (of_page_means, CANDIDATES),
    "the attention itself": (of_attention, CANDIDATES),
}
"""Rules, and how many candidates, over the pages that are chosen."""


def two_levels(fine: Tensor, layer: Layer, coarse: Coarse, candidates: int) -> Tensor:
    """Scores, with those outside of the best blocks below all others."""
    per = BLOCK_TOKENS // layer.page_tokens
    blocks = coarse(layer).unflatten(1, layer.queries.shape[1:3])
    at, last = torch.arange(blocks.shape[-1]), (layer.counts - 1) // per
    blocks = blocks.masked_fill(at > last[:, None, None], -torch.inf).softmax(-1).sum(2)
    blocks = blocks.masked_fill((at == 0) | (at == last[:, None]), torch.inf)
    rank = blocks.argsort(-1, descending=True).argsort(-1)
    wanted = (candidates * (TENTH.share * layer.counts).round() / per).ceil()
    there = (rank < wanted[:, None]).repeat_interleave(per, -1)[..., : fine.shape[-1]]
    return torch.where(there, fine, fine - 1e3)


def masses(number: int, bases: Path) -> dict[str, float]:
    """Return the figures of one text for tuning."""
    from headrace.model import resolve

    lm, encode = model(str(resolve(None)))
    ours = kept(learned(lm, encode, bases).ours)
    tokens = torch.tensor(text(number, encode, held_out=False).tokens)
    first, kv, asked = len(tokens) - TAIL_TOKENS, lm.empty(len(tokens)), []

    def watch(layer: int, rows: Tensor, q: Tensor) -> None:
        asked.append(q[rows >= first].clone())

    lm.compute(tokens, kv, torch.arange(len(tokens)), watch=watch)
    found: dict[str, list[float]] = {name: [] for name in ("one level", *COARSE)}
    for number_, q in enumerate(asked):
        rows = torch.arange(first, len(tokens))
        layer = Layer.of(number_, q, rows, kv.keys[number_], kv.values[number_], 16)
        mass = layer.attention().mean(2).unflatten(-1, (-1, 16)).sum(-1)
        fine = ours(layer)
        ways = {name: two_levels(fine, layer, *told) for name, told in COARSE.items()}
        for name, scores in {"one level": fine, **ways}.items():
            found[name].append(float((mass * TENTH(scores, layer)).sum(-1).mean()))
    return {name: sum(each) / len(each) for name, each in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, required=True, metavar="FILE")
    parser.add_argument("--texts", type=int, default=len(KINDS), metavar="N", help="0: times alone")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    figures = times()
    print(json.dumps(figures, indent=1), flush=True)
    texts = []
    for number in range(options.texts):
        texts.append(masses(number, options.json.with_suffix(".npz")))
        print(KINDS[number % len(KINDS)], json.dumps(texts[-1]), flush=True)
    for name in texts[0] if texts else ():
        figures[f"levels.mass.{name}"] = sum(one[name] for one in texts) / len(texts)
    found = {"figures": {name: round(value, 4) for name, value in figures.items()}, "texts": texts}
    options.json.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found["figures"], indent=1))


if __name__ == "__main__":
    main()
