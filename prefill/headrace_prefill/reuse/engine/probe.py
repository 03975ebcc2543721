"""Which positions the prompt's last tokens attend to, learned by a cheap pass over placed KV.

The probe computes the rows of the prompt's last tokens, behind which the answer begins, through all
layers, over KV that was placed and not corrected. At each layer,

    mass[l, t] = mean over last rows i and heads h of softmax_t(scale * q_ih . k_th), t <= i

with the keys as they lie in the cache while the probe runs. The pass computes these rows again.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace_prefill.reuse.engine.paged import BlockTable
from headrace_prefill.reuse.engine.rows import RowEngine, Rows

MOST_SCORES = 2**24
"""Attention scores held at once: 64 MiB in fp32."""


def attention_mass(
    queries: Tensor, keys: Tensor, positions: NDArray[np.int64], scale: float
) -> Tensor:
    """Attention that rows pay to each position, summed over the rows, averaged over heads.

    Args:
        queries: [rows, heads, head_dim], rotated.
        keys: [tokens, kv_heads, head_dim], rotated, of positions 0 to tokens - 1.
        positions: int64 [rows], of the rows, ascending; each sees positions up to its own.
        scale: of the scores.

    Returns:
        float32 [tokens].
    """
    rows, heads, dim = queries.shape
    tokens, kv_heads, _ = keys.shape
    by_head = keys.transpose(0, 1).contiguous().transpose(1, 2)
    grouped = queries.view(rows, kv_heads, heads // kv_heads, dim).permute(1, 2, 0, 3)
    at = torch.arange(tokens, device=keys.device)
    last = torch.from_numpy(positions).to(keys.device)
    total = torch.zeros(tokens, device=keys.device)
    size = max(1, MOST_SCORES // (heads * tokens))
    for first in range(0, rows, size):
        part = grouped[:, :, first : first + size]
        scores = torch.bmm(part.reshape(kv_heads, -1, dim), by_head).float().mul_(scale)
        scores = scores.view(kv_heads, heads // kv_heads, -1, tokens)
        # Ascending rows: all of them see what the first one sees.
        seen = int(positions[first]) + 1
        unseen = at[seen:] > last[first : first + size, None]
        scores[..., seen:].masked_fill_(unseen, float("-inf"))
        total += scores.softmax(-1).sum((0, 1, 2))
    return total / heads


class Probe:
    """The probe of one prompt; rows are computed by whoever owns it, in parts.

    Args:
        engine: computes rows.
        table: the prompt's blocks.
        token_ids: int64 [n], of the prompt.
        last: first position of the last rows, which reach to the end.
    """

    def __init__(
        self,
        engine: RowEngine,
        table: BlockTable,
        token_ids: NDArray[np.int64],
        last: int,
    ) -> None:
        if not 0 <= last < len(token_ids):
            raise ValueError(f"probe: the last rows begin at {last} of {len(token_ids)} tokens")
        self._engine, self._table, self._last = engine, table, last
        positions = np.arange(last, len(token_ids))
        layers = engine.layers
        self.rows = Rows(table, positions, token_ids[positions], np.full(len(positions), layers))
        self._mass = torch.zeros(layers, len(token_ids), device=engine.kv.device)
        self._context = self._slots(np.arange(len(token_ids)))

    def watch(self, layer: int, queries: Tensor, positions: NDArray[np.int64]) -> None:
        """Count the attention of rows that a layer has just computed.

        Args:
            queries: [rows, heads * head_dim], of these rows.
            positions: int64 [rows], ascending.
        """
        if not len(positions):
            return
        end = int(positions[-1]) + 1
        module = self._engine.decoder.attention[layer]
        asking = queries.view(len(queries), module.num_heads, module.head_size)
        keys, _ = self._engine.kv.gather(layer, self._context[:end])
        mass = attention_mass(asking, keys, positions, module.impl.scale)
        self._mass[layer, :end] += mass

    def finish(self) -> NDArray[np.float32]:
        """What was counted.

        Returns:
            float32 [layers, n]: mean attention of the last rows; each layer sums to 1.
        """
        asked = len(self._context) - self._last
        mass: NDArray[np.float32] = (self._mass / asked).cpu().numpy()
        return mass

    def _slots(self, positions: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(self._table.slots(positions)).to(self._engine.kv.device)
