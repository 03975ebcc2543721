"""Decode attention to what each KV head keeps of a context, beside attention to all of it, and the
time to choose and fit what is kept.

Attention: each arm computes some layers, one after another, as one CUDA graph. Heads keep from a
tenth of the mean to nearly twice as much. Choice: one choice of a streamed request, with a
predictor, from its whole context: scores, selection, fit, and copies to other blocks, in all
layers. Keys are random: neither time depends on them.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.parts import Report
from benchmarks.gpu.timing import DEVICE, empty_cache, graph, milliseconds
from headrace_decode.compression.engine.compressed_attention import (
    CompressedRow,
    CompressedStep,
    RetainedPages,
)
from headrace_decode.compression.engine.compression_job import EARLIER_TOKENS
from headrace_decode.compression.engine.head_pages import HeadPages
from headrace_decode.compression.engine.incremental import IncrementalCompression
from headrace_decode.compression.importance_predictor import ImportancePredictor
from headrace_engine.kv_views import KvOrder
from headrace_engine.rope import Rope
from headrace_engine.vllm.attention.paged_kernels import (
    flash_attention,
    triton_attention,
    triton_causal_attention,
)

KEEP_RATIO, PAGE, WIDTH = 0.25, 32, 32


@dataclass(frozen=True)
class Sizes:
    """Sizes of the measurement: heads as in Llama 3 8B, contexts in tokens.

    Attributes:
        layers: number of layers of an arm of attention; those of a choice.
    """

    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    layers: tuple[int, int] = (4, 32)
    contexts: tuple[int, ...] = (8192, 32768)
    rows: tuple[int, ...] = (1, 16)
    turns: int = 30


SMALL = Sizes(heads=4, kv_heads=2, dim=32, layers=(1, 2), contexts=(512,), rows=(1,), turns=1)


def measured(dry: bool, report: Report) -> dict[str, Any]:
    """Return the milliseconds a layer by context, rows and arm, and those of a choice."""
    sizes, found = SMALL if dry else Sizes(), dict[str, Any]()
    for context in sizes.contexts:
        for rows in sizes.rows:
            found[f"{context}.{rows}"] = _attention(context, rows, sizes)
            report(found)
            empty_cache()
        found[f"{context}.choice"] = _choice(context, sizes)
        report(found)
        empty_cache()
    return found


def _head_pages(blocks: int, layers: int, sizes: Sizes) -> tuple[HeadPages, Tensor]:
    shape = layers, blocks, sizes.kv_heads, PAGE, 2 * sizes.dim
    caches = torch.randn(shape, dtype=torch.bfloat16, device=DEVICE)
    return HeadPages(list(caches), 1, KvOrder.JOINED), caches


def _attention(context: int, rows: int, sizes: Sizes) -> dict[str, float]:
    """Return the milliseconds a layer of each arm."""
    layers, pages = sizes.layers[0], context // PAGE
    head_pages, caches = _head_pages(1 + rows * (pages + 1), layers, sizes)
    tables = (1 + torch.arange(rows * (pages + 1), device=DEVICE).view(rows, -1)).int()
    mean = KEEP_RATIO * pages
    by_head = torch.linspace(0.1 * mean, 1.9 * mean, layers * sizes.kv_heads).long().clamp(1)
    counts = by_head.view(layers, -1).to(DEVICE)
    made = []
    for row in range(rows):
        blocks = tables[row].tolist()
        held = RetainedPages.filled(pages * PAGE, counts, head_pages.of_blocks(blocks))
        token = slice(row, row + 1)
        made.append(CompressedRow(row, token, pages * PAGE + 1, held, slice(pages, pages + 1)))
    query = torch.randn((rows, sizes.heads, sizes.dim), dtype=torch.bfloat16, device=DEVICE)
    output, scale = torch.empty_like(query), sizes.dim**-0.5
    ints = {"dtype": torch.int32, "device": DEVICE}
    starts, lengths = torch.arange(rows + 1, **ints), torch.full((rows,), pages * PAGE + 1, **ints)

    def dense(kernel: Callable[..., None]) -> None:
        for cache in caches:
            keys, values = cache.transpose(1, 2).split(sizes.dim, -1)
            given = query, keys, values, output, starts, lengths, tables, pages * PAGE + 1, scale
            kernel(*given)

    step = CompressedStep(made, tables, head_pages, triton_causal_attention)

    def kept() -> None:
        for layer in range(layers):
            step.attend(layer, query, output, scale)

    def make_tables() -> None:
        CompressedStep(made, tables, head_pages, triton_causal_attention)

    functions: dict[str, Callable[[], None]] = {
        "all, Triton": partial(dense, triton_attention),
        "all, FlashAttention": partial(dense, flash_attention),
        "kept": kept,
    }
    replays = {name: graph(function) for name, function in functions.items()}
    arms = {name: replay for name, replay in replays.items() if replay is not None}
    times: dict[str, list[float]] = {name: [] for name in [*arms, "tables"]}
    for _ in range(sizes.turns):
        for name, arm in arms.items():
            times[name].append(milliseconds(arm) / layers)
        times["tables"].append(milliseconds(make_tables))  # of all layers, once a step
    return {name: statistics.median(each) for name, each in times.items()}


def _choice(context: int, sizes: Sizes) -> dict[str, float]:
    """Return the milliseconds of a choice in all layers."""
    layers, pages = sizes.layers[1], context // PAGE
    kept = int(KEEP_RATIO * pages)
    head_pages, _ = _head_pages(1 + pages + kept, layers, sizes)
    heads, both = (layers, sizes.kv_heads), 2 * sizes.dim
    shapes = (*heads, both, WIDTH), (*heads, WIDTH), (*heads, WIDTH), (*heads, both), heads
    networks = [0.1 * torch.randn(shape, device=DEVICE) for shape in shapes]
    speeds = torch.logspace(0, -4, sizes.dim // 2, dtype=torch.float64, device=DEVICE)
    queries = torch.randn(
        (EARLIER_TOKENS, sizes.heads, sizes.dim), dtype=torch.bfloat16, device=DEVICE
    )
    numbers = list(range(1, 1 + pages + kept))
    new, room = head_pages.pages(numbers[:pages]), head_pages.of_blocks(numbers[pages:])
    times = []
    for _ in range(min(3, sizes.turns)):
        stream = IncrementalCompression(
            head_pages, sizes.dim**-0.5, Rope(speeds), ImportancePredictor(*networks)
        )
        for layer in range(layers):
            stream.add_queries(layer, queries)
        times.append(milliseconds(partial(_drop, stream, context, new, room)))
    return {"ms": min(times)}


def _drop(stream: IncrementalCompression, tokens: int, new: Tensor, room: Tensor) -> None:
    with torch.inference_mode():
        stream.drop(tokens, new, room)


def figures(found: Mapping[str, Any]) -> dict[str, float]:
    """Return the speedup over the fastest attention to all KV, and the milliseconds of a choice."""
    told: dict[str, float] = {}
    for key, one in found.items():
        context, what = key.split(".")
        if what == "choice":
            told[f"compression_choice_ms_{context}"] = one["ms"]
            continue
        whole = min(value for arm, value in one.items() if arm.startswith("all"))
        told[f"compression_decode_speedup_{context}_rows_{what}"] = whole / one["kept"]
    return told


def markdown(found: Mapping[str, Any]) -> str:
    """Return a table of the measurements."""
    names = "all, Triton", "all, FlashAttention", "kept", "tables"
    head = ["KV", "rows", *(f"{name}, ms" for name in names)]
    lines = ["| " + " | ".join(head) + " |", "|" + "---:|" * len(head)]
    for key, one in found.items():
        if not key.endswith(".choice"):
            shown = [f"{one[name]:.3f}" if name in one else "-" for name in names]
            lines.append("| " + " | ".join([*key.split("."), *shown]) + " |")
    lines += [
        f"- a choice from {key.split('.')[0]} tokens: {one['ms']:.0f} ms"
        for key, one in found.items()
        if key.endswith(".choice")
    ]
    return "\n".join(lines)
