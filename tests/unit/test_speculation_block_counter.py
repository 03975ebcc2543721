"""How many KV blocks a batch holds is known from what changed."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest

from headrace_decode.speculative.block_counter import BlockCounter

BLOCKS = 200


class Batch:
    """Requests that get blocks, share prefixes, move between rows, are preempted and end."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.rows: dict[str, list[int]] = {}
        self.prefix = self.new(5)
        self.names = 0

    def new(self, count: int, beside: Sequence[int] = ()) -> list[int]:
        """Blocks that are not among those that stand beside them."""
        return self.rng.sample(sorted({*range(BLOCKS)} - {*beside}), count)

    def step(self) -> None:
        kind = self.rng.random()
        if kind < 0.2:
            self.names += 1
            shared = self.prefix[: self.rng.randrange(6)]
            self.rows[f"r{self.names}"] = shared + self.new(self.rng.randrange(4), shared)
        elif self.rows:
            name = self.rng.choice([*self.rows])
            if kind < 0.7:
                self.rows[name] = self.rows[name] + self.new(1, self.rows[name])
            elif kind < 0.8:
                del self.rows[name]
            elif kind < 0.9:
                count = max(1, len(self.rows[name]) + self.rng.randrange(-1, 2))
                self.rows[name] = self.new(count, self.rows[name])
            else:
                order = [*self.rows.items()]
                self.rng.shuffle(order)
                self.rows = dict(order)

    def table(self) -> tuple[list[str], np.ndarray, np.ndarray]:
        table = np.full((len(self.rows) + 2, 60), 7, np.int32)
        for number, blocks in enumerate(self.rows.values()):
            table[number, : len(blocks)] = blocks
        lengths = np.array([len(blocks) for blocks in self.rows.values()], np.int32)
        return [*self.rows], table, lengths


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("every", [1, 3])
def test_it_counts_like_a_set(seed: int, every: int) -> None:
    held, batch = BlockCounter(BLOCKS), Batch(seed)
    for number in range(150):
        batch.step()
        if number % every == 0:
            wanted = {block for row in batch.rows.values() for block in row} - {0}
            assert held.update(*batch.table()) == len(wanted)


def test_a_step_reads_only_new_blocks() -> None:
    rows, blocks = 100, 250
    table = np.arange(1, rows * (blocks + 1) + 1, dtype=np.int32).reshape(rows, blocks + 1)
    held, names = BlockCounter(rows * (blocks + 1) + 1), [str(row) for row in range(rows)]
    assert held.update(names, table, np.full(rows, blocks)) == rows * blocks
    before = held.entries_read
    lengths = np.full(rows, blocks)
    lengths[7] += 1
    assert held.update(names, table, lengths) == rows * blocks + 1
    assert held.entries_read == before + 1
