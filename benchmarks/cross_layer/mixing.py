"""Ways for one decoding row to attend to mixed KV, in milliseconds, on vLLM's CPU kernel.

    python -m benchmarks.cross_layer.mixing --json FILE [--tokens 8192] [--heads 3] [--dim 64]

One layer of SmolLM2's shape, bfloat16, one thread, blocks of 128 tokens in random places. The ways
take turns. `plain` is attention to one layer's KV. The others mix two layers':

    compiled   mix K and V of a block in one compiled pass, attend once: what the model does
    torch      the same with torch's own operations
    keys       mix K with torch, attend twice, to V of either layer, and mix the outputs
    wide       copy both layers' KV side by side, attend once with heads twice as wide
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from vllm import _custom_ops as ops
from vllm.platforms import current_platform

from headrace_prefill.cross_layer.engine.blocks import Mixer

BLOCK, CACHE_BLOCKS, GROUP, REPEATS = 128, 512, 3, 30


def attending(cache: Tensor, values: Tensor, table: Tensor, tokens: int) -> Callable[[], None]:
    """One row's attention to K of one cache and V of another, both [blocks, heads, block, 2D]."""
    heads, dim = cache.shape[1], cache.shape[3] // 2
    query = torch.randn(1, heads * GROUP, dim, dtype=cache.dtype)
    output, lengths = torch.empty_like(query), torch.tensor([tokens], dtype=torch.int32)
    starts = torch.tensor([0, 1], dtype=torch.int32)
    schedule = ops.cpu_attn_get_scheduler_metadata(
        num_reqs=1,
        num_heads=heads * GROUP,
        num_kv_heads=heads,
        head_dim=dim,
        seq_lens=lengths,
        dtype=cache.dtype,
        query_start_loc=starts,
        causal=True,
        sliding_window_size=-1,
        isa="vec",
        enable_kv_split=True,
        dynamic_causal=None,
        kv_cache_dtype="auto",
    )
    keys, _ = cache.view(len(cache), heads, 2 * BLOCK, dim).chunk(2, 2)
    _, other = values.view(len(values), heads, 2 * BLOCK, dim).chunk(2, 2)

    def attend() -> None:
        ops.cpu_attention_with_kv_cache(
            query=query,
            key_cache=keys,
            value_cache=other,
            output=output,
            query_start_loc=starts,
            seq_lens=lengths,
            scale=dim**-0.5,
            causal=True,
            alibi_slopes=None,
            sliding_window=-1,
            block_table=table,
            softcap=0,
            scheduler_metadata=schedule,
            s_aux=None,
        )

    return attend


def ways(tokens: int, heads: int, dim: int) -> dict[str, Callable[[], None]]:
    """Each way of the module's docstring, to be called again and again."""
    shape, count = (CACHE_BLOCKS, heads, BLOCK, 2 * dim), -(-tokens // BLOCK)
    first, last = (torch.randn(shape).bfloat16() for _ in range(2))
    a, b = (torch.rand(shape[1:]).bfloat16() for _ in range(2))
    blocks = torch.randperm(CACHE_BLOCKS)[:count]
    places, own = blocks.int()[None], torch.arange(count, dtype=torch.int32)[None]
    numbers, mixer = blocks.numpy(), Mixer()
    mixed = mixer.mix(first, last, numbers, a, b)
    attend_mixed = attending(mixed, mixed, own, tokens)

    def compiled() -> None:
        mixer.mix(first, last, numbers, a, b)
        attend_mixed()

    def by_torch() -> None:
        for i, n in enumerate(numbers):
            torch.mul(first[n], a, out=mixed[i]).addcmul_(last[n], b)
        attend_mixed()

    # The kernel takes K and V of equal strides: the scratch is as large as a layer's cache.
    scratch = torch.empty(shape, dtype=torch.bfloat16)
    half = BLOCK * dim
    k_first, k_last, k_mixed = (t.view(-1, heads, 2, half)[:, :, 0] for t in (first, last, scratch))
    k_a, k_b = (t.view(heads, 2, half)[:, 0] for t in (a, b))
    to_first, to_last = (attending(scratch, values, places, tokens) for values in (first, last))

    def keys() -> None:
        for n in numbers:
            torch.mul(k_first[n], k_a, out=k_mixed[n]).addcmul_(k_last[n], k_b)
        to_first()
        to_last()

    side = torch.empty(count, heads, BLOCK, 4 * dim, dtype=torch.bfloat16)
    side_keys = side.view(count, heads, 2, 2 * half)[:, :, 0].view(count, heads, 2, half)
    side_values = side.view(count, heads, 2, 2 * half)[:, :, 1].view(count, heads, BLOCK, 2, dim)
    v_first, v_last = (t.view(-1, heads, 2, BLOCK, dim)[:, :, 1] for t in (first, last))
    attend_wide = attending(side, side, own, tokens)

    def wide() -> None:
        for i, (k, v) in enumerate(((k_first, v_first), (k_last, v_last))):
            side_keys[:, :, i] = k.index_select(0, blocks)
            side_values[:, :, :, i] = v.index_select(0, blocks)
        attend_wide()

    plain = attending(first, first, places, tokens)
    return {"plain": plain, "compiled": compiled, "torch": by_torch, "keys": keys, "wide": wide}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, required=True, metavar="FILE")
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 8192], metavar="N")
    parser.add_argument("--heads", type=int, default=3, metavar="N")
    parser.add_argument("--dim", type=int, default=64, metavar="N")
    options = parser.parse_args()
    torch.set_num_threads(1)
    current_platform.import_kernels()
    figures: dict[str, dict[int, float]] = {}
    for tokens in options.tokens:
        least: dict[str, float] = {}
        arms = ways(tokens, options.heads, options.dim)
        for name, work in list(arms.items()) * REPEATS:
            begun = time.perf_counter()
            work()
            least[name] = min(least.get(name, np.inf), time.perf_counter() - begun)
        for name, seconds in least.items():
            figures.setdefault(f"{name}_ms", {})[tokens] = seconds * 1e3
    options.json.write_text(json.dumps({"figures": figures}, indent=1))
    print(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
