"""Decode attention of long rows: all KV, by vLLM's kernels, and the pages that ours chooses.

Each arm computes the attention of some layers, one after another, as one CUDA graph; with more KV
than the card's cache holds, no layer finds its data there. Ours scores all pages, chooses, writes
the tables and attends; two more arms are its scores alone, and scores and choice. Keys are random:
the time does not depend on which pages are chosen.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benchmarks.gpu.timing import graph, milliseconds
from headrace_decode.attention.page_counts import page_count, selected_page_count
from headrace_decode.sparse.basis import COORDINATES, Basis
from headrace_decode.sparse.kernels.attention import DecodeRows, Kernel, attend
from headrace_decode.sparse.kernels.cache import HeadCache
from headrace_decode.sparse.kernels.page_selection import scores, tables
from headrace_decode.sparse.kernels.summaries import DeviceSummaries
from headrace_engine.vllm.attention.paged_kernels import flash_attention, triton_attention

HEADS, KV_HEADS, DIM, LAYERS = 32, 8, 128, 4
"""Llama 3 8B, some of its layers."""
SHARE, CONTEXTS, ROWS, PAGES = 0.05, (131072, 32768), (1, 4, 8), (32, 16)
TURNS = 30
KERNELS: dict[str, Kernel] = {"Triton": triton_attention, "FlashAttention": flash_attention}


def measured() -> dict[str, Any]:
    """Return the milliseconds a layer, by context, rows, page and arm, and ratios."""
    found: dict[str, Any] = {}
    for context in CONTEXTS:
        for rows in ROWS:
            for page in PAGES:
                found[f"{context}.{rows}.{page}"] = one = _of(context, rows, page)
                print(f"sparse: {context}.{rows}.{page}: {one}", file=sys.stderr, flush=True)
                torch.cuda.empty_cache()
    return found


def _of(context: int, rows: int, page: int) -> dict[str, Any]:
    n = page_count(context, page)
    shape = (rows * n, KV_HEADS, page, 2 * DIM)
    layers = [torch.randn(shape, dtype=torch.bfloat16, device="cuda") for _ in range(LAYERS)]
    caches = [HeadCache.of(one) for one in layers]
    draw = torch.Generator().manual_seed(0)
    rest = [torch.randn(size, generator=draw).numpy() for size in _basis_shapes()]
    made = [DeviceSummaries(rows * n, page, Basis(*rest), "cuda") for _ in layers]
    blocks = torch.randperm(rows * n, generator=draw).view(rows, n).int().cuda()
    for summaries, cache in zip(made, caches, strict=True):
        summaries.refresh(cache, blocks.flatten().long())
    bring_up_ms = milliseconds(lambda: made[0].refresh(caches[0], blocks.flatten().long()))
    made[0].sums.zero_()
    query = torch.randn((rows, HEADS, DIM), dtype=torch.bfloat16, device="cuda")
    chosen = selected_page_count(context, page, SHARE)
    assert chosen is not None
    ints = {"dtype": torch.int32, "device": "cuda"}
    counts, taken, fill = (
        torch.full((rows,), each, **ints) for each in (n - 1, chosen, context - (n - 1) * page)
    )
    full, newest = blocks[:, :-1].contiguous(), blocks[:, -1].contiguous()
    step = DecodeRows(full, counts, taken, newest, fill, chosen)
    starts = torch.arange(rows + 1, **ints)
    lengths = torch.full((rows,), context, **ints)
    output = torch.empty_like(query)

    def dense(kernel: Kernel) -> None:
        for one in layers:
            keys, values = one.transpose(1, 2).split(DIM, -1)
            given = (query, keys, values, output, starts, lengths, blocks, context, DIM**-0.5)
            kernel(*given)

    def sparse(kernel: Kernel) -> None:
        for summaries, cache in zip(made, caches, strict=True):
            attend(summaries, cache, query, step, DIM**-0.5, kernel)

    def parts(with_choice: bool) -> None:
        for summaries, cache in zip(made, caches, strict=True):
            if with_choice:
                rest = step.counts, step.chosen, step.newest, cache.heads_apart, DIM**-0.5
                tables(summaries, query, step.pages, *rest, step.most)
            else:
                scores(summaries, query, step.pages, step.counts, DIM**-0.5)

    functions: dict[str, Callable[[], None]] = {
        "scores": partial(parts, False),
        "scores and choice": partial(parts, True),
    }
    for name, kernel in KERNELS.items():
        functions |= {f"dense, {name}": partial(dense, kernel)}
        functions |= {f"sparse, {name}": partial(sparse, kernel)}
    replays = {name: graph(function) for name, function in functions.items()}
    arms = {name: replay for name, replay in replays.items() if replay is not None}
    times: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(TURNS):
        for name, arm in arms.items():
            times[name].append(milliseconds(arm))
    ms = {name: statistics.median(each) / LAYERS for name, each in times.items()}
    best = {
        kind: min((value for name, value in ms.items() if name.startswith(kind)), default=None)
        for kind in ("dense", "sparse")
    }
    dense_ms, sparse_ms = best["dense"], best["sparse"]
    return {
        "ms_per_layer": ms,
        "speedup": dense_ms / sparse_ms if dense_ms and sparse_ms else None,
        "unchanged_pages_us": 1000 * bring_up_ms / (rows * n),
    }


def _basis_shapes() -> tuple[tuple[int, ...], ...]:
    return (KV_HEADS, DIM), (KV_HEADS, DIM, COORDINATES), (KV_HEADS, COORDINATES, DIM)


def figures(found: dict[str, Any]) -> dict[str, Any]:
    """Return the speedup at the longest context, by rows, with the better page."""
    longest = max(CONTEXTS)
    return {
        f"sparse_decode_speedup_{longest // 1024}k_rows_{rows}": max(
            found[f"{longest}.{rows}.{page}"]["speedup"] or 0.0 for page in PAGES
        )
        for rows in ROWS
    }


def markdown(found: dict[str, Any]) -> str:
    """Return a table of the measurements."""
    names = [f"{kind}, {name}" for kind in ("dense", "sparse") for name in KERNELS]
    names += ["scores", "scores and choice"]
    head = ["KV", "rows", "page", *(f"{name}, ms" for name in names), "best dense / best sparse"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---:|" * len(head)]
    for key, one in found.items():
        times = (one["ms_per_layer"].get(name) for name in names)
        shown = ["-" if each is None else f"{each:.3f}" for each in times]
        ratio = "-" if one["speedup"] is None else f"{one['speedup']:.1f}"
        lines.append("| " + " | ".join([*key.split("."), *shown, ratio]) + " |")
    return "\n".join(lines)
