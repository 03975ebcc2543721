"""Selective recompute of two tensor-parallel ranks, each in a thread, without a model.

The caches, the stored blocks and their checksums are real; each rank has one of two KV heads. The
model's layers are random numbers. As real layers do, they wait for the other rank's same rows: if
the ranks differ in what they compute, or one waits in vain, the test fails.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace_engine.kv_views import KvOrder
from headrace_engine.rank_group import RankGroup
from headrace_engine.rope import Rope
from headrace_kvstore.blocks.block_layout import BlockLayout
from headrace_kvstore.blocks.checksum import copy_sum
from headrace_kvstore.blocks.sharding import HeadSharding
from headrace_prefill.blending.engine.kv_scatter import KvScatter, StoredRun
from headrace_prefill.blending.engine.paged import BlockTable, PagedKV
from headrace_prefill.blending.engine.rows import Rows
from headrace_prefill.blending.engine.selective_recompute import (
    RecomputeRequest,
    SelectiveRecompute,
    Stepped,
)

RANKS, LAYERS, BLOCKS, TOKENS, DIM, WIDTH = 2, 3, 64, 8, 4, 5
WAIT_S = 20.0


class Threads(RankGroup):
    """A rank of a group of threads; `Meeting` is where they compare values."""

    def __init__(self, rank: int, meeting: Meeting) -> None:
        super().__init__()
        object.__setattr__(self, "_rank", rank)
        object.__setattr__(self, "_meeting", meeting)

    def exchange(self, what: str, mine: Any) -> list[Any]:
        """Return the values of all ranks, which must exchange the same thing now."""
        return self._meeting.exchange(self._rank, what, mine)  # type: ignore[attr-defined]

    def union(self, names: Any, among: Sequence[str]) -> set[str]:
        told = self.exchange("union", (sorted(names), list(among)))
        assert len({tuple(each) for _, each in told}) == 1, "ranks ask about different requests"
        return {name for each, _ in told for name in each} & set(among)

    def mean(self, values: NDArray[np.float32]) -> NDArray[np.float32]:
        mean: NDArray[np.float32] = np.mean(self.exchange("mean", values), 0, np.float32)
        return mean


class Meeting:
    """Where all ranks wait for each other. `log` has what they exchanged."""

    def __init__(self) -> None:
        self._barrier = threading.Barrier(RANKS, timeout=WAIT_S)
        self._told: list[Any] = [None] * RANKS
        self.log: list[tuple[str, Any]] = []

    def exchange(self, rank: int, what: str, mine: Any) -> list[Any]:
        self._told[rank] = what, mine
        self._barrier.wait()
        told = list(self._told)
        self._barrier.wait()
        assert len({each for each, _ in told}) == 1, f"ranks differ: {[e for e, _ in told]}"
        if not rank:
            self.log.append(told[0])
        return [each for _, each in told]

    def abort(self) -> None:
        self._barrier.abort()


class Model:
    """A rank's `RowEngine`, whose K, V and attention are random."""

    layers = LAYERS

    def __init__(self, rank: int, ranks: Threads) -> None:
        self.ranks, self._rank = ranks, rank
        shape = (BLOCKS, 1, TOKENS, 2 * DIM)
        self.kv = PagedKV([torch.zeros(shape) for _ in range(LAYERS)], KvOrder.JOINED, TOKENS)
        self.rope = Rope.of({"rope_theta": 100.0, "head_dim": DIM, "num_attention_heads": 2})
        module: Any = type("Module", (), {"num_heads": 1, "head_size": DIM})()
        module.impl = type("Impl", (), {"scale": DIM**-0.5})()
        self.decoder = type("Decoder", (), {"attention": [module] * LAYERS})()

    def compute(self, parts: Sequence[Rows], watch: Any, fresh: Any) -> Tensor:
        positions = np.concatenate([part.positions for part in parts])
        depths = np.concatenate([part.depths for part in parts])
        told = self.ranks.exchange("compute", (positions.tolist(), depths.tolist()))
        assert told[0] == told[1], "ranks compute different rows"
        slots = torch.from_numpy(np.concatenate([part.where() for part in parts]))
        for layer in range(LAYERS):
            alive = np.flatnonzero(depths > layer)
            made = np.random.default_rng([self._rank, layer, *positions[alive]])
            q, k, v = torch.from_numpy(made.normal(size=(3, len(alive), DIM)).astype(np.float32))
            fresh(layer, k, v, alive)
            self.kv.put(layer, slots[alive], k[:, None], v[:, None])
            watch(layer, 9 * q, torch.empty_like(q), alive)
        return torch.zeros(int((depths >= LAYERS).sum()), WIDTH)

    def likeliest(self, row: Tensor) -> int:
        assert row.shape == (1, WIDTH)
        self.ranks.exchange("logits", None)
        return 7


class Document:
    """Stored blocks of both ranks' heads."""

    def __init__(self, seed: int, blocks: int) -> None:
        self.tokens = blocks * TOKENS
        part = TOKENS * 2 * DIM
        made = np.random.default_rng(seed)
        self.payload = made.normal(size=(blocks, LAYERS, RANKS, part)).astype(np.float32)
        self.seeds = made.integers(0, 2**63, (blocks, LAYERS * RANKS)).astype(np.uint64)
        copies = np.empty_like(self.payload[0])
        offsets = np.arange(LAYERS * RANKS, dtype=np.uint64) * np.uint64(part * 4)
        into = offsets + np.uint64(copies.ctypes.data)
        self.sums = np.stack(
            [
                copy_sum(into, offsets + np.uint64(block.ctypes.data), part * 4, seeds)
                for block, seeds in zip(self.payload, self.seeds, strict=True)
            ]
        )

    def damage(self, block: int, rank: int) -> None:
        """Change one number of one rank's part of a block."""
        self.payload[block, LAYERS - 1, rank, 3] += 1

    def at(self, new: int) -> StoredRun:
        size = self.payload[0].nbytes
        addresses = self.payload.ctypes.data + np.arange(len(self.payload)) * size
        run = addresses.astype(np.uint64), self.sums, self.seeds
        return StoredRun(*run, offset=0, length=self.tokens, old=100, new=new)


class Rank:
    """One rank: its model, and its pass."""

    def __init__(self, number: int, meeting: Meeting) -> None:
        self.number = number
        self._documents: list[Document] = []
        """Whose memory requests read."""
        self.model = Model(number, Threads(number, meeting))
        caches = {f"layers.{n}": cache for n, cache in enumerate(self.model.kv.caches)}
        shard = HeadSharding(RANKS, RANKS).shard(number)
        layout = BlockLayout.of_tensors(caches, BLOCKS, shard)
        engine: Any = self.model
        self.recompute = SelectiveRecompute(
            engine, KvScatter(self.model.kv, layout, self.model.rope)
        )

    def start(
        self,
        name: str,
        document: Document,
        blocks: Sequence[int],
        choose: Callable[[Any], Any],
        last: int | None = None,
        outside: bool = True,
    ) -> None:
        """Start a prompt of five tokens, the document, and eight tokens; without `outside`, the
        five have KV, and the eight are missing."""
        self._documents.append(document)
        tokens = np.arange(5 + document.tokens + (8 if outside else 0))
        table = BlockTable(np.array(blocks), TOKENS)
        request = RecomputeRequest(
            *(name, tokens, table, 0 if outside else 5, [document.at(5)], choose),
            *(last, None if last is None else 9),
        )
        self.recompute.start(name, lambda: request)

    def run(self, budget: int) -> list[Stepped]:
        """Step until nothing is left."""
        steps = []
        while len(self.recompute):
            steps.append(self.recompute.step(budget))
        return steps


def on_ranks(task: Callable[[Rank], Any]) -> tuple[list[Any], Meeting]:
    """Do a task on all ranks at once; its results, and what the ranks exchanged.

    Raises:
        Exception: the first one of a rank, which does not leave the other waiting.
    """
    meeting = Meeting()
    results: list[Any] = [None] * RANKS
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            results[number] = task(Rank(number, meeting))
        except BaseException as error:
            errors.append(error)
            meeting.abort()

    threads = [threading.Thread(target=work, args=(n,)) for n in range(RANKS)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    if errors:
        raise errors[0]
    return results, meeting
