"""Can a 7B model infer over 32K tokens within one 24 GB card? Bytes of its KV, line by line.

    python -m benchmarks.longcontext.question --json FILE [--tokens N] [--card-gb N]

Shapes of Llama 2 7B (32 layers, 32 heads of 128, fp16) with random keys and values. Of each line,
what one layer keeps is made by the code that would make it, and weighed twice: bytes of its arrays,
and what the process's resident memory grew by. All layers of a line are alike, so a line is that
times the layers that keep KV. Weights are 13.5 GiB (6.74e9 parameters of 2 bytes, and
buffers).

    table.LINE.card_gib, .host_gib   of arrays; of KV on the card, and beside it
    table.LINE.resident_vs_arrays    resident bytes over those of the arrays, both memories
    table.LINE.fits                  whether the card holds weights, KV and 1 GiB for a step
"""

from __future__ import annotations

import argparse
import gc
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from torch import Tensor

from headrace_decode.attention.offload.footprint import footprint
from headrace_decode.attention.page_counts import selected_page_count
from headrace_decode.compression.selection import select_tokens
from headrace_decode.sparse.summaries import Summaries
from headrace_kvstore.codec import CODECS, LayerShape, Order

LAYERS, HEADS, GROUPED, DIM = 32, 32, 8, 128
BLOCK_TOKENS, PAGE_TOKENS, STEP_TOKENS = 128, 32, 512
WEIGHTS_BYTES, STEP_BYTES = int(13.5 * 2**30), 2**30
KEPT, CHOSEN = 0.25, 0.1
GIB = 2**30


@dataclass
class Made:
    """Arrays of one layer on the card and in host memory, and the card's bytes that all layers
    share."""

    card: list[Any] = field(default_factory=list)
    host: list[Any] = field(default_factory=list)
    once_bytes: int = 0


Maker = Callable[[int, int], Made]
"""(tokens, KV heads) -> a layer's KV."""


@dataclass(frozen=True)
class Line:
    """
    Attributes:
        kv_heads: of a layer. layers: that keep KV.
    """

    name: str
    make: Maker
    kv_heads: int = HEADS
    layers: int = LAYERS


def numbers(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    """Random, standard normal."""
    return torch.randn(shape, dtype=torch.float16).to(dtype)


def whole(dtype: torch.dtype) -> Maker:
    """All tokens, as vLLM lays out its cache: blocks, heads, tokens, K and V."""

    def make(tokens: int, kv_heads: int) -> Made:
        blocks = -(-tokens // BLOCK_TOKENS)
        return Made([numbers(blocks, kv_heads, BLOCK_TOKENS, 2 * DIM, dtype=dtype)])

    return make


def int4(tokens: int, kv_heads: int) -> Made:
    """Blocks as the store's codec keeps them, scales included."""
    shape = LayerShape(kv_heads, BLOCK_TOKENS, DIM, "float16", Order.VEC)
    coder = CODECS["int4"]().bind(shape)
    kept = np.empty((-(-tokens // BLOCK_TOKENS), coder.stored_bytes), np.uint8)
    block = numbers(shape.layer_bytes // 2).numpy().view(np.uint8)
    for stored in kept:
        coder.encode(block, stored)
    return Made([kept])


def dropped(dtype: torch.dtype) -> Maker:
    """Return the `KEPT` best of all (head, token) pairs by random scores, packed by head."""

    def make(tokens: int, kv_heads: int) -> Made:
        kept = select_tokens(torch.rand(1, kv_heads, tokens), int(KEPT * kv_heads * tokens))[0]
        return Made([numbers(int(one.sum()), 2 * DIM, dtype=dtype) for one in kept])

    return make


def offloaded(tokens: int, kv_heads: int) -> Made:
    """Host memory has all. The card has slots for what a step attends to, the newest blocks,
    summaries of all pages, and once a buffer that a layer's KV is lined up in."""
    chosen = selected_page_count(tokens, PAGE_TOKENS, CHOSEN)
    blocks = footprint(tokens, chosen, PAGE_TOKENS, BLOCK_TOKENS, STEP_TOKENS).blocks
    per = BLOCK_TOKENS // PAGE_TOKENS
    cache = numbers(blocks * per, kv_heads, PAGE_TOKENS, 2 * DIM)
    host = numbers(-(-tokens // PAGE_TOKENS), kv_heads, PAGE_TOKENS, 2 * DIM)
    summaries = Summaries(len(cache) + len(host), kv_heads, PAGE_TOKENS, DIM)
    buffer_bytes = host.numel() * host.element_size()
    return Made([cache, summaries.codes, summaries.scales], [host], buffer_bytes)


def lines() -> Iterator[Line]:
    half, fp8 = LAYERS // 2, torch.float8_e4m3fn
    yield Line("fp16, 32 KV heads", whole(torch.float16))
    yield Line("fp8", whole(fp8))
    yield Line("int4", int4)
    yield Line("8 KV heads (GQA)", whole(torch.float16), GROUPED)
    yield Line("dropping to 25 %", dropped(torch.float16))
    yield Line("sparse offload, 10 %", offloaded)
    yield Line("FusedKV", whole(torch.float16), layers=half)
    yield Line("FusedKV, fp8", whole(fp8), layers=half)
    yield Line("dropping to 25 %, fp8", dropped(fp8))
    yield Line("FusedKV, dropping to 25 %", dropped(torch.float16), layers=half)
    yield Line("FusedKV, dropping to 25 %, fp8", dropped(fp8), layers=half)
    yield Line("GQA, fp8", whole(fp8), GROUPED)
    yield Line("GQA, sparse offload, 10 %", offloaded, GROUPED)
    yield Line("GQA, FusedKV, dropping to 25 %, fp8", dropped(fp8), GROUPED, half)


def weighed(line: Line, tokens: int, card_bytes: int) -> dict[str, float]:
    """Return a line's figures."""
    line.make(BLOCK_TOKENS * 32, 1)  # compiles, and fills the allocator's own caches
    gc.collect()
    before = psutil.Process().memory_info().rss
    made = line.make(tokens, line.kv_heads)
    gc.collect()
    resident = psutil.Process().memory_info().rss - before
    card, host = (sum(each.nbytes for each in some) for some in (made.card, made.host))
    on_card = line.layers * card + made.once_bytes
    return {
        "card_gib": on_card / GIB,
        "host_gib": line.layers * host / GIB,
        "resident_vs_arrays": resident / (card + host),
        "fits": float(WEIGHTS_BYTES + on_card + STEP_BYTES <= card_bytes),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, required=True, metavar="FILE")
    parser.add_argument("--tokens", type=int, default=32_768, metavar="N")
    parser.add_argument("--card-gb", type=float, default=24.0, metavar="N", help="of 10^9 bytes")
    options = parser.parse_args()
    torch.manual_seed(0)
    figures: dict[str, float] = {}
    print("| line | layers with KV | card, GiB | host, GiB | fits |\n|---|---:|---:|---:|---|")
    for line in lines():
        found = weighed(line, options.tokens, int(options.card_gb * 1e9))
        fits = "yes" if found["fits"] else "no"
        print(
            f"| {line.name} | {line.layers} | {found['card_gib']:.2f} | "
            f"{found['host_gib']:.2f} | {fits} |",
            flush=True,
        )
        figures |= {f"table.{line.name}.{name}": round(v, 4) for name, v in found.items()}
    options.json.write_text(json.dumps({"figures": figures}, indent=1) + "\n")


if __name__ == "__main__":
    main()
