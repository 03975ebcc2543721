"""Cost in decoding of a layer that mixes two layers' KV: mixing first, then attention.

Each arm computes some layers, one after another, as one CUDA graph. All rows have blocks of their
own, so nothing is mixed twice. `triton` is `headrace_prefill.cross_layer.engine.triton_mixing`,
`torch` the same with torch's operations. An engine on CUDA has the former.
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
from benchmarks.gpu.timing import DEVICE, graph, milliseconds
from headrace_engine.vllm.attention.paged_kernels import triton_attention
from headrace_prefill.cross_layer.engine.triton_mixing import mix_blocks
from headrace_prefill.cross_layer.mixing import mix

HEADS, KV_HEADS, DIM, BLOCK = 32, 8, 128, 16
"""Llama 3 8B."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of the measurement: contexts in tokens, rows, layers of the model, turns."""

    contexts: tuple[int, ...] = (32768, 8192, 2048)
    rows: tuple[int, ...] = (8, 1)
    layers: int = 4
    turns: int = 30


SMALL = Sizes(contexts=(64,), rows=(1, 2), layers=1, turns=1)
ONE, TRITON, TORCH = "attention to one layer's KV", "mixed by Triton", "mixed by torch"

Mixing = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def mixed_by_torch(first: Tensor, last: Tensor, blocks: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Return the same as `mix_blocks`, except for the rounding."""
    return mix(first[blocks], last[blocks], a, b)


def measured(dry: bool, report: Report) -> dict[str, Any]:
    """Return the milliseconds a layer, by context, rows and arm."""
    sizes, found = SMALL if dry else Sizes(), dict[str, Any]()
    for context in sizes.contexts:
        for rows in sizes.rows:
            found[f"{context}.{rows}"] = _of(context, rows, sizes)
            report(found)
    return found


def _of(context: int, rows: int, sizes: Sizes) -> dict[str, float]:
    made = {"dtype": torch.bfloat16, "device": DEVICE}
    blocks = rows * context // BLOCK
    layers = [
        torch.randn((blocks, BLOCK, KV_HEADS, 2 * DIM), **made) for _ in range(sizes.layers + 1)
    ]
    weights = [torch.randn((KV_HEADS, 2 * DIM), **made) for _ in range(2)]
    query = torch.randn((rows, HEADS, DIM), **made)
    output = torch.empty_like(query)
    ints = {"dtype": torch.int32, "device": DEVICE}
    numbers = torch.randperm(blocks, device=DEVICE).int()
    starts, lengths = torch.arange(rows + 1, **ints), torch.full((rows,), context, **ints)
    own = torch.arange(blocks, **ints).view(rows, -1)

    def attend(kv: Tensor, table: Tensor) -> None:
        given = (query, *kv.split(DIM, -1), output, starts, lengths, table, context, DIM**-0.5)
        triton_attention(*given)

    def one() -> None:
        for kv in layers[1:]:
            attend(kv, numbers.view(rows, -1))

    def mixed(mixing: Mixing) -> None:
        for kv in layers[1:]:
            attend(mixing(layers[0], kv, numbers, *weights), own)

    functions: dict[str, Callable[[], None]] = {
        ONE: one,
        TRITON: partial(mixed, mix_blocks),
        TORCH: partial(mixed, mixed_by_torch),
    }
    arms = {name: graph(function) for name, function in functions.items()}
    times: dict[str, list[float]] = {name: [] for name, arm in arms.items() if arm is not None}
    for _ in range(sizes.turns):
        for name, each in times.items():
            each.append(milliseconds(arms[name]))  # type: ignore[arg-type]
    return {name: statistics.median(each) / sizes.layers for name, each in times.items()}


def figures(found: Mapping[str, Any]) -> dict[str, float]:
    """At the longest context with most rows."""
    longest = max(tuple(map(int, key.split("."))) for key in found)
    ms = found[".".join(map(str, longest))]
    pairs = {"torch": (TRITON, TORCH), "one_layer": (TRITON, ONE)}
    return {
        f"fused_decode_triton_vs_{name}": ms[mine] / ms[other]
        for name, (mine, other) in pairs.items()
        if mine in ms and other in ms
    }


def markdown(found: Mapping[str, Any]) -> str:
    """Return a table of the measurements."""
    names = [ONE, TRITON, TORCH]
    head = ["KV", "rows", *(f"{name}, ms" for name in names)]
    lines = ["| " + " | ".join(head) + " |", "|" + "---:|" * len(head)]
    for key, ms in found.items():
        shown = [f"{ms[name]:.3f}" if name in ms else "-" for name in names]
        lines.append("| " + " | ".join([*key.split("."), *shown]) + " |")
    return "\n".join(lines)
