"""Computation of chosen rows of prompts, layer by layer, over KV in the engine's paged cache.

Row p of a prompt is computed in its first `depth[p]` layers, so that the rows of layer l,

    S_l = {p : depth[p] > l},        S_{l+1} within S_l,

are nested by construction, and the input of a row at layer l, its hidden state after layer l - 1,
is available. At each layer the fresh K and V of all of S_l are written first. Then each maximal run
[a, b] of S_l is a pseudo-request of b - a + 1 queries over b + 1 positions of the prompt's own
blocks, so a row sees all positions up to its own and none after it.

Rows may be computed in parts, if each part goes through all its layers and parts come in ascending
order of position: a row reads only KV of its own and earlier positions, which is final then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace_engine.rank_group import RankGroup
from headrace_engine.rope import Rope
from headrace_engine.vllm.forward_pass import Decoder, ForwardContexts
from headrace_prefill.blending.engine.paged import BlockTable, PagedKV

Watch = Callable[[int, Tensor, Tensor, NDArray[np.int64]], None]
"""Called after each layer's attention with: the layer's number; the queries of the rows that it
computes and their attention output, each [rows, heads * head_dim]; the rows' indices in the whole
batch. The rows' own K and V are in the cache. The callee may overwrite the output."""
Fresh = Callable[[int, Tensor, Tensor, NDArray[np.int64]], None]
"""Called before each layer's attention with: the layer's number; K and V of the rows that it
computes, each [rows, kv_heads * head_dim], K rotated; the rows' indices in the whole batch. This K
and V are not yet in the cache."""


@dataclass(frozen=True)
class Rows:
    """Rows of one prompt.

    Attributes:
        table: the prompt's blocks.
        positions: int64 [n], ascending.
        token_ids: int64 [n].
        depths: int64 [n], number of leading layers that compute each row; at least 1.
        slots: int64 [n], slots to which their K and V are written; None for the table's.
    """

    table: BlockTable
    positions: NDArray[np.int64]
    token_ids: NDArray[np.int64]
    depths: NDArray[np.int64]
    slots: NDArray[np.int64] | None = None

    def __post_init__(self) -> None:
        if not len(self.positions) == len(self.token_ids) == len(self.depths):
            raise ValueError("rows: positions, token ids and depths differ in number")
        if (np.diff(self.positions) <= 0).any():
            raise ValueError("rows: positions must ascend")
        if len(self.depths) and self.depths.min() < 1:
            raise ValueError("rows: a row that no layer computes")

    def where(self) -> NDArray[np.int64]:
        """Return the slots of these rows."""
        return self.table.slots(self.positions) if self.slots is None else self.slots

    def part(self, part: slice) -> Rows:
        """Return some of these rows."""
        slots = None if self.slots is None else self.slots[part]
        return Rows(
            self.table, self.positions[part], self.token_ids[part], self.depths[part], slots
        )


@dataclass(frozen=True)
class _Batch:
    """Rows of several prompts, as arrays [n]; `prompt` is the index of each row's prompt."""

    prompt: NDArray[np.int64]
    positions: NDArray[np.int64]
    depths: NDArray[np.int64]
    slots: NDArray[np.int64]


class RowEngine:
    """The model of one engine, for computing rows.

    Args:
        decoder: the model's parts.
        kv: its cache.
        contexts: makes attention metadata.
        rope: of the model; also an attribute.
        ranks: of the engine; also an attribute. All ranks compute the same rows at the same time:
            the model's layers add up their parts.
    """

    def __init__(
        self,
        decoder: Decoder,
        kv: PagedKV,
        contexts: ForwardContexts,
        rope: Rope,
        ranks: RankGroup,
    ) -> None:
        self.decoder, self.kv, self.rope, self.ranks = decoder, kv, rope, ranks
        self._contexts = contexts

    @property
    def layers(self) -> int:
        """Number of layers of the model."""
        return len(self.decoder.layers)

    @torch.inference_mode()
    def likeliest(self, row: Tensor) -> int:
        """Return the likeliest token after a row that `compute` returned, [1, width]."""
        return int(self.decoder.logits(row)[-1].argmax())

    @torch.inference_mode()
    def compute_whole(self, rows: Rows, positions: NDArray[np.int64]) -> Tensor:
        """Compute rows as if in a step of vLLM's: by the model's own forward pass.

        Args:
            rows: of which all layers compute all.
            positions: int64 [n], by which the model turns queries and keys.

        Returns:
            [n, width]: the input of the model's head.
        """
        batch = _batch([rows])
        slots = self._on_device(batch.slots)
        tables = [self.kv.kernel_blocks(rows.table)]
        metadata = self._metadata(batch, np.arange(len(positions)), tables, slots)
        with self._contexts.all_layers(metadata, slots):
            return self.decoder.forward(self._on_device(rows.token_ids), self._on_device(positions))

    @torch.inference_mode()
    def compute(
        self, parts: Sequence[Rows], watch: Watch | None = None, fresh: Fresh | None = None
    ) -> Tensor:
        """Compute rows and leave their K and V in the cache.

        Args:
            parts: rows of one prompt each; a prompt appears once.
            watch: called with each layer's attention. fresh: called with each layer's K and V.

        Returns:
            [rows that went through all layers, width]: the input of the model's head.
        """
        batch = _batch(parts)
        ids = np.concatenate([part.token_ids for part in parts])
        hidden: Tensor = self.decoder.embed(self._on_device(ids))
        residual: Tensor | None = None
        alive = np.arange(len(ids))
        tables = [self.kv.kernel_blocks(part.table) for part in parts]
        positions = slots = metadata = None
        for number, layer in enumerate(self.decoder.layers):
            keep = batch.depths[alive] > number
            if not keep.all():
                kept = self._on_device(np.flatnonzero(keep))
                hidden, alive, positions = hidden[kept], alive[keep], None
                residual = None if residual is None else residual[kept]
            if not len(alive):
                break
            if positions is None:
                positions = self._on_device(batch.positions[alive])
                slots = self._on_device(batch.slots[alive])
                metadata = self._metadata(batch, alive, tables, slots)
            hidden, residual = self._layer(
                *(number, layer, positions, hidden, residual, metadata, slots),
                *(watch, fresh, alive),
            )
        if residual is None or not len(alive):
            return hidden[:0]
        last: Tensor = self.decoder.norm(hidden, residual)[0]
        return last

    def _layer(
        self,
        number: int,
        layer: Any,
        positions: Tensor,
        hidden: Tensor,
        residual: Tensor | None,
        metadata: Any,
        slots: Any,
        watch: Watch | None,
        fresh: Fresh | None,
        alive: NDArray[np.int64],
    ) -> tuple[Tensor, Tensor]:
        hooks = []
        attention = self.decoder.attention[number]
        if watch is not None:
            hooks.append(
                attention.register_forward_hook(
                    lambda _, arguments, output: watch(number, arguments[0], output, alive)
                )
            )
        if fresh is not None:
            hooks.append(
                attention.register_forward_pre_hook(
                    lambda _, arguments: fresh(number, arguments[1], arguments[2], alive)
                )
            )
        try:
            with self._contexts.layer(number, metadata, slots):
                hidden, residual = layer(positions, hidden, residual)
        finally:
            for hook in hooks:
                hook.remove()
        assert residual is not None
        return hidden, residual

    def _metadata(
        self, batch: _Batch, alive: NDArray[np.int64], tables: list[NDArray[np.int64]], slots: Any
    ) -> Any:
        prompt, positions = batch.prompt[alive], batch.positions[alive]
        # A run ends where the next row is not the next position of the same prompt.
        ends = np.flatnonzero((np.diff(positions) != 1) | (np.diff(prompt) != 0))
        ends = np.concatenate([ends, [len(alive) - 1]])
        queries = np.diff(ends, prepend=-1)
        lengths, owners = positions[ends] + 1, prompt[ends]
        width = -(-int(lengths.max()) // self.kv.kernel_tokens)
        padded = np.zeros((len(tables), width), np.int64)
        for row, table in zip(padded, tables, strict=True):
            row[: len(table)] = table[:width]
        return self._contexts.metadata(queries, lengths, padded[owners], slots)

    def _on_device(self, array: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.kv.device)


def _batch(parts: Sequence[Rows]) -> _Batch:
    sizes = [len(part.positions) for part in parts]
    return _Batch(
        prompt=np.repeat(np.arange(len(parts)), sizes),
        positions=np.concatenate([part.positions for part in parts]),
        depths=np.concatenate([part.depths for part in parts]),
        slots=np.concatenate([part.where() for part in parts]),
    )
