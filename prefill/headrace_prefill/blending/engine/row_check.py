"""A check, when an engine starts, that rows computed outside of its steps are the model's own.

The class of a model does not tell what it computes. Some models scale their embeddings or add
something between two layers, in code, and some turn keys in another way than their modules say. So
three things are measured with one short prompt, in a block that no request has yet:

    form        embedding, layers and norm in turn give the hidden states, K and V of the model's
                own forward pass
    attention   the probe's attention gives the output of the engine's kernel
    keys        K at other positions, computed without attention, is K at the first ones, moved by
                the model's `Rope`; V is the same

Both sides of a comparison compute batches of the same shape, so rounding differs little.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace_engine.vllm.forward_pass import Unsupported
from headrace_prefill.blending.engine.paged import BlockTable
from headrace_prefill.blending.engine.probe import attended
from headrace_prefill.blending.engine.rows import RowEngine, Rows

TOKENS, FIRST_TOKEN = 16, 5
BLOCK = 1
"""vLLM gives block 0 to no request, and keeps it for padding."""
MAX_ERROR = 0.05
"""Largest difference, by norm, that rounding explains. Other computations differ by 0.5 or more."""


@torch.inference_mode()
def check_rows(engine: RowEngine, max_positions: int) -> None:
    """Compare rows with the model's own. All ranks call this.

    Args:
        max_positions: number of positions that prompts may have.

    Raises:
        Unsupported: they differ; the text says in what.
    """
    n = min(TOKENS, engine.kv.block_tokens, max_positions)
    table, at = BlockTable(np.array([BLOCK]), engine.kv.block_tokens), np.arange(n)
    rows = Rows(table, at, FIRST_TOKEN + at, np.full(n, engine.layers))
    slots = torch.from_numpy(rows.where()).to(engine.kv.device)

    def kv() -> Tensor:
        """Return K and V, [layers, 2, n, KV heads, head_dim], and clear them."""
        pairs = [torch.stack(engine.kv.gather(layer, slots)) for layer in range(engine.layers)]
        for layer, (keys, _) in enumerate(pairs):
            engine.kv.put(layer, slots, *[torch.zeros_like(keys)] * 2)
        return torch.stack(pairs).float()

    attention: list[float] = []

    def watch(layer: int, queries: Tensor, output: Tensor, _: NDArray[np.int64]) -> None:
        module = engine.decoder.attention[layer]
        asking = queries.view(n, module.num_heads, module.head_size)
        got, _ = attended(asking, *engine.kv.gather(layer, slots), at + 1, module.impl.scale)
        attention.append(_error(got.reshape(output.shape), output))

    whole, whole_kv = engine.compute_whole(rows, at), kv()
    ours, our_kv = engine.compute([rows], watch), kv()
    others = max_positions - 1 - at
    with _without_attention(engine):
        engine.compute_whole(rows, at)
        old = kv()
        engine.compute_whole(rows, others)
        new = kv()
    by = torch.from_numpy(others - at)
    moved = torch.stack([engine.rope.shift(keys, by) for keys in old[:, 0]])
    for error, why in (
        (_error(ours, whole), "it is more than embedding, layers and norm in turn"),
        (_error(our_kv, whole_kv), "its layers store other K and V in its own forward pass"),
        (float(np.max(attention)), "its attention is no softmax of scaled products"),
        (_error(moved, new[:, 0]), "it turns keys in another way than its modules say"),
        (_error(new[:, 1], old[:, 1]), "its V depends on the position"),
    ):
        if not error <= MAX_ERROR:
            name = engine.decoder.name
            raise Unsupported(f"rows of {name} cannot be recomputed: {why} (error {error:.2g})")


@contextmanager
def _without_attention(engine: RowEngine) -> Iterator[None]:
    """Have attention add nothing, so that hidden states depend on no position."""
    hooks = [
        module.register_forward_hook(lambda *called: called[-1].zero_())
        for module in engine.decoder.attention
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _error(found: Tensor, wanted: Tensor) -> float:
    difference = (found.float() - wanted.float()).norm()
    return float(difference / wanted.float().norm())
