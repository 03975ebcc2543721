"""Decode attention of long rows: all KV, by vLLM's kernels, and the pages that ours chooses.

Each arm computes the attention of some layers, one after another, as one CUDA graph; with more KV
than the card's cache holds, no layer finds its data there. Ours scores all pages, chooses, writes
the tables and attends. To see where the time goes, three more arms are its scores alone, scores and
choice, and attention to pages that are chosen already, and torch's profiler names the kernels of
one layer. Keys are random: the time does not depend on which pages are chosen.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from benchmarks.gpu.parts import Report
from benchmarks.gpu.timing import DEVICE, empty_cache, graph, milliseconds
from headrace_decode.attention.page_counts import MIN_TOKENS, page_count, selected_page_count
from headrace_decode.sparse.basis import COORDINATES, Basis
from headrace_decode.sparse.kernels.attention import DecodeRows, Kernel, attend
from headrace_decode.sparse.kernels.cache import HeadCache
from headrace_decode.sparse.kernels.page_selection import scores, tables
from headrace_decode.sparse.kernels.summaries import DeviceSummaries
from headrace_engine.vllm.attention.paged_kernels import flash_attention, triton_attention

SHARE = 0.05


@dataclass(frozen=True)
class Sizes:
    """Sizes of the measurement: heads as in Llama 3 8B, contexts and pages in tokens."""

    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    layers: int = 4
    contexts: tuple[int, ...] = (131072, 32768)
    rows: tuple[int, ...] = (1, 4, 8)
    pages: tuple[int, ...] = (32, 16)
    turns: int = 30


SMALL = Sizes(heads=4, kv_heads=2, dim=32, layers=1, contexts=(MIN_TOKENS,), rows=(1,), turns=1)
KINDS = "dense", "sparse", "chosen pages"
KERNELS: dict[str, Kernel] = {"Triton": triton_attention, "FlashAttention": flash_attention}


def measured(dry: bool, report: Report) -> dict[str, Any]:
    """Return the milliseconds a layer, by context, rows, page and arm, and ratios."""
    sizes, found = SMALL if dry else Sizes(), dict[str, Any]()
    for context in sizes.contexts:
        for rows in sizes.rows:
            for page in sizes.pages:
                found[f"{context}.{rows}.{page}"] = _of(context, rows, page, sizes)
                report(found)
                empty_cache()
    return found


def _of(context: int, rows: int, page: int, sizes: Sizes) -> dict[str, Any]:
    n = page_count(context, page)
    heads, kv_heads, dim = sizes.heads, sizes.kv_heads, sizes.dim
    shape = (rows * n, kv_heads, page, 2 * dim)
    layers = [torch.randn(shape, dtype=torch.bfloat16, device=DEVICE) for _ in range(sizes.layers)]
    caches = [HeadCache.of(one) for one in layers]
    draw = torch.Generator().manual_seed(0)
    rest = [torch.randn(size, generator=draw).numpy() for size in _basis_shapes(sizes)]
    made = [DeviceSummaries(rows * n, page, Basis(*rest), DEVICE) for _ in layers]
    blocks = torch.randperm(rows * n, generator=draw).view(rows, n).int().to(DEVICE)
    for summaries, cache in zip(made, caches, strict=True):
        summaries.refresh(cache, blocks.flatten().long())
    bring_up_ms = milliseconds(lambda: made[0].refresh(caches[0], blocks.flatten().long()))
    made[0].sums.zero_()
    query = torch.randn((rows, heads, dim), dtype=torch.bfloat16, device=DEVICE)
    chosen = selected_page_count(context, page, SHARE)
    assert chosen is not None
    ints = {"dtype": torch.int32, "device": DEVICE}
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
            keys, values = one.transpose(1, 2).split(dim, -1)
            given = (query, keys, values, output, starts, lengths, blocks, context, dim**-0.5)
            kernel(*given)

    def sparse(kernel: Kernel) -> None:
        for summaries, cache in zip(made, caches, strict=True):
            attend(summaries, cache, query, step, dim**-0.5, kernel)

    def parts(with_choice: bool) -> None:
        for summaries, cache in zip(made, caches, strict=True):
            if with_choice:
                rest = step.counts, step.chosen, step.newest, cache.heads_apart, dim**-0.5
                tables(summaries, query, step.pages, *rest, step.most)
            else:
                scores(summaries, query, step.pages, step.counts, dim**-0.5)

    def chosen_only(kernel: Kernel) -> None:
        for table, cache in zip(ready, caches, strict=True):
            split = query.view(rows * kv_heads, heads // kv_heads, dim)
            lengths = ((taken - 1) * page + fill).repeat_interleave(kv_heads)
            starts = torch.arange(rows * kv_heads + 1, **ints)
            where = (split, cache.keys, cache.values, torch.empty_like(split), starts, lengths)
            kernel(*where, table.flatten(0, 1), chosen * page, dim**-0.5)

    ready = [
        tables(
            *(summaries, query, step.pages, step.counts, step.chosen, step.newest),
            *(cache.heads_apart, dim**-0.5, step.most),
        )
        for summaries, cache in zip(made, caches, strict=True)
    ]
    functions: dict[str, Callable[[], None]] = {
        "scores": partial(parts, False),
        "scores and choice": partial(parts, True),
    }
    for name, kernel in KERNELS.items():
        functions |= {f"dense, {name}": partial(dense, kernel)}
        functions |= {f"sparse, {name}": partial(sparse, kernel)}
        functions |= {f"chosen pages, {name}": partial(chosen_only, kernel)}
    replays = {name: graph(function) for name, function in functions.items()}
    arms = {name: replay for name, replay in replays.items() if replay is not None}
    times: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(sizes.turns):
        for name, arm in arms.items():
            times[name].append(milliseconds(arm))
    ms = {name: statistics.median(each) / sizes.layers for name, each in times.items()}
    best = {
        kind: min((value for name, value in ms.items() if name.startswith(kind)), default=None)
        for kind in ("dense", "sparse")
    }
    dense_ms, sparse_ms = best["dense"], best["sparse"]
    return {
        "ms_per_layer": ms,
        "speedup": dense_ms / sparse_ms if dense_ms and sparse_ms else None,
        "unchanged_pages_us": 1000 * bring_up_ms / (rows * n),
        "kernels_us": _kernels(partial(sparse, triton_attention)),
    }


def _kernels(function: Callable[[], None]) -> dict[str, float]:
    """Return the microseconds of each kernel on the card; nothing on a CPU."""
    if DEVICE == "cpu":
        function()
        return {}
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        function()
        torch.cuda.synchronize()
    return {
        event.key[:80]: float(event.device_time_total)
        for event in profile.key_averages()
        if event.device_time_total
    }


def _basis_shapes(sizes: Sizes) -> tuple[tuple[int, ...], ...]:
    kv_heads, dim = sizes.kv_heads, sizes.dim
    return (kv_heads, dim), (kv_heads, dim, COORDINATES), (kv_heads, COORDINATES, dim)


def figures(found: Mapping[str, Any]) -> dict[str, float]:
    """Return, at the longest context and by rows, the speedup with the better page, and the shares
    of scores and of choice in it."""
    told: dict[str, float] = {}
    longest = max(int(key.split(".")[0]) for key in found)
    for key, one in found.items():
        context, rows, _ = key.split(".")
        place = f"{longest // 1024}k_rows_{rows}"
        name = f"sparse_decode_speedup_{place}"
        if int(context) < longest or not one["speedup"] or one["speedup"] <= told.get(name, 0.0):
            continue
        ms = one["ms_per_layer"]
        whole = min(value for arm, value in ms.items() if arm.startswith("sparse"))
        told[name] = one["speedup"]
        told[f"sparse_scores_share_{place}"] = ms["scores"] / whole
        told[f"sparse_choice_share_{place}"] = (ms["scores and choice"] - ms["scores"]) / whole
    return told


def markdown(found: Mapping[str, Any]) -> str:
    """Return a table of the measurements."""
    names = [f"{kind}, {name}" for kind in KINDS for name in KERNELS]
    names += ["scores", "scores and choice"]
    head = ["KV", "rows", "page", *(f"{name}, ms" for name in names), "best dense / best sparse"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---:|" * len(head)]
    for key, one in found.items():
        times = (one["ms_per_layer"].get(name) for name in names)
        shown = ["-" if each is None else f"{each:.3f}" for each in times]
        ratio = "-" if one["speedup"] is None else f"{one['speedup']:.1f}"
        lines.append("| " + " | ".join([*key.split("."), *shown, ratio]) + " |")
    return "\n".join(lines)
