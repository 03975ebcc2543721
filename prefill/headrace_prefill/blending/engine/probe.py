"""A cheap pass over placed KV that estimates which positions the answer will attend to.

The probe computes the rows of the prompt's last tokens, and then, token by token, those of a draft
of the answer, through all layers, over KV that was placed and not corrected. Most text outside of
the runs has no KV yet: its rows are computed after the choice, over corrected KV. The probe's rows
attend only to positions that have KV. A key of zeros would not count as missing: it draws more
attention than almost any other.

    mass[l, t] = mean over rows i and heads h of softmax_t(scale * q_ih . k_th)
                 over t <= i that have KV

Therefore their attention is computed here and overwrites the kernel's output. Selective recompute
later computes the prompt's rows again. K and V of the draft lie in slots that have no KV yet, and
are overwritten later.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace_prefill.blending.engine.paged import BlockTable
from headrace_prefill.blending.engine.rows import RowEngine, Rows
from headrace_prefill.blending.token_selection import DRAFT_TOKENS

MAX_SCORES = 2**24
"""Maximum number of attention scores in memory at a time: 64 MiB in fp32."""


def attended(
    queries: Tensor, keys: Tensor, values: Tensor, seen: NDArray[np.int64], scale: float
) -> tuple[Tensor, Tensor]:
    """Compute the attention of some rows, and the share of it that each token gets.

    Args:
        queries: [rows, heads, head_dim], rotated.
        keys, values: [tokens, kv_heads, head_dim], keys rotated.
        seen: int64 [rows], ascending, at least 1: number of leading tokens that each row sees.
        scale: factor of the scores.

    Returns:
        The rows' attention output, [rows, heads, head_dim] in the dtype of `queries`; and float32
        [tokens], the weights, summed over rows and averaged over heads.
    """
    rows, heads, dim = queries.shape
    tokens, kv_heads, _ = keys.shape
    by_head, given = keys.permute(1, 2, 0).contiguous(), values.transpose(0, 1).float()
    grouped = queries.view(rows, kv_heads, heads // kv_heads, dim).permute(1, 2, 0, 3)
    at = torch.arange(tokens, device=keys.device)
    end = torch.from_numpy(seen).to(keys.device)
    total = torch.zeros(tokens, device=keys.device)
    got = torch.empty_like(queries)
    size = max(1, MAX_SCORES // (heads * tokens))
    for first in range(0, rows, size):
        part = grouped[:, :, first : first + size]
        scores = torch.bmm(part.reshape(kv_heads, -1, dim), by_head).float().mul_(scale)
        scores = scores.view(kv_heads, heads // kv_heads, -1, tokens)
        # Rows ascend, so all of them see the tokens that the first one sees.
        all_see = int(seen[first])
        unseen = at[all_see:] >= end[first : first + size, None]
        scores[..., all_see:].masked_fill_(unseen, float("-inf"))
        weights = scores.softmax(-1)
        total += weights.sum((0, 1, 2))
        mixed = torch.bmm(weights.flatten(1, 2), given).view(*part.shape)
        got[first : first + size] = mixed.permute(2, 0, 1, 3).flatten(1, 2).to(got.dtype)
    return got, total / heads


class Probe:
    """The probe of one prompt; selective recompute computes its rows, in parts.

    Args:
        engine: computes rows.
        table: the prompt's blocks.
        token_ids: int64 [n], of the prompt.
        last: first position of the last rows, which extend to the end.
        there: bool [n], positions that have KV, besides those of the last rows.
        final: the token after `token_ids`, from which a draft begins; None for no draft.

    Attributes:
        rows: the rows to compute next.
    """

    def __init__(
        self,
        engine: RowEngine,
        table: BlockTable,
        token_ids: NDArray[np.int64],
        last: int,
        there: NDArray[np.bool_],
        final: int | None = None,
    ) -> None:
        n = len(token_ids)
        if not 0 <= last < n:
            raise ValueError(f"probe: the last rows begin at {last} of {n} tokens")
        self._engine, self._table, self._n = engine, table, n
        room = np.concatenate([np.flatnonzero(~there[:last]), np.arange(n, table.capacity)])
        behind = 0 if final is None or len(room) <= DRAFT_TOKENS else 1 + DRAFT_TOKENS
        own = table.slots(np.arange(last, n))
        self._asking = np.concatenate([own, table.slots(room[:behind])])
        before = np.flatnonzero(there[:last])
        self._context = np.concatenate([before, np.arange(last, n + behind)])
        slots = np.concatenate([table.slots(before), self._asking])
        self._slots = torch.from_numpy(slots).to(engine.kv.device)
        self._last, self._end = last, n + behind
        self._mass = torch.zeros(engine.layers, n + behind, device=engine.kv.device)
        asked = token_ids[last:]
        ids = np.append(asked, final) if behind and final is not None else asked
        self.rows = self._rows(last, ids)

    @property
    def drafts(self) -> bool:
        """Whether more rows follow those in `rows`."""
        return int(self.rows.positions[-1]) + 1 < self._end

    def draft(self, token: int) -> None:
        """Continue with the token that follows `rows`."""
        self.rows = self._rows(int(self.rows.positions[-1]) + 1, np.array([token]))

    def watch(
        self, layer: int, queries: Tensor, output: Tensor, positions: NDArray[np.int64]
    ) -> None:
        """Compute the attention of rows that a layer is computing, and add it to the mass.

        Args:
            queries: [rows, heads * head_dim], of these rows.
            output: of the same shape; the attention output is written to it.
            positions: int64 [rows], ascending.
        """
        if not len(positions):
            return
        seen = np.searchsorted(self._context, positions, "right")
        end = int(seen[-1])
        module = self._engine.decoder.attention[layer]
        asking = queries.view(len(queries), module.num_heads, module.head_size)
        keys, values = self._engine.kv.gather(layer, self._slots[:end])
        got, mass = attended(asking, keys, values, seen, module.impl.scale)
        output.copy_(got.reshape(output.shape))
        self._mass[layer, torch.from_numpy(self._context[:end]).to(mass.device)] += mass

    def finish(self) -> NDArray[np.float32]:
        """Return the attention mass of the prompt's positions.

        Returns:
            float32 [layers, n]: mean attention of the rows. Together with the attention to the
            positions after the prompt, a layer sums to 1.
        """
        mass: NDArray[np.float32] = (self._mass / len(self._asking)).cpu().numpy()
        return mass[:, : self._n]

    def _rows(self, first: int, ids: NDArray[np.int64]) -> Rows:
        positions = np.arange(first, first + len(ids))
        depths = np.full(len(ids), self._engine.layers)
        return Rows(self._table, positions, ids, depths, self._asking[positions - self._last])
