"""The cache groups of an engine with recurrent layers (Mamba, GDN), and what a hit needs of them.

A recurrent layer keeps a state in place of KV: that of a whole prefix, which is in the engine at
some block boundaries only. So a stored block of such an engine is one block of its pool: the pages
of one group's layers. The attention layers' block of a position has vLLM's block hash as its name,
as in other engines. Each group of recurrent layers has a name made of that one and of its number.

A prefix of n blocks is a hit if the KV of all n blocks is stored, and the state of each group after
the last of them. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import compress

from headrace_kvstore.identity.namespace import owned_name

ASKED_AT_ONCE = 64
"""Number of positions that are asked for at once, from the end of a prefix on."""


@dataclass(frozen=True)
class StateGroups:
    """Numbers of the groups.

    Attributes:
        attention: of the attention layers.
        recurrent: of the recurrent layers.
    """

    attention: int
    recurrent: tuple[int, ...]

    def name(self, block: bytes, group: int) -> bytes:
        """Return the name of a group's state after a block.

        Args:
            block: name of the attention layers' block.
            group: number of a group of recurrent layers.
        """
        return owned_name(block, b"state %d" % group)

    def names(self, block: bytes) -> list[bytes]:
        """Return the names of all groups' states after a block."""
        return [self.name(block, group) for group in self.recurrent]

    def hit(
        self, blocks: Sequence[bytes], lacking: Callable[[Sequence[bytes]], Sequence[bool]]
    ) -> int:
        """Return the length of the longest prefix after which all states are stored.

        Args:
            blocks: names of a prompt's blocks, from any of them on.
            lacking: returns for each name whether the store lacks it.
        """
        first, *others = self.recurrent
        for end in range(len(blocks), 0, -ASKED_AT_ONCE):
            some = range(end, max(0, end - ASKED_AT_ONCE), -1)
            absent = lacking([self.name(blocks[i - 1], first) for i in some])
            for found in compress(some, [not lacks for lacks in absent]):
                if not any(lacking([self.name(blocks[found - 1], each) for each in others])):
                    return found
        return 0

    def of_prefix(
        self, blocks: Sequence[bytes], tables: Sequence[Sequence[int]], start: int
    ) -> tuple[list[int], list[bytes]]:
        """Return the engine's blocks that a hit is loaded into, and the names of what goes there:
        the KV of all blocks, and the states after the last one.

        Args:
            blocks: names of the hit's blocks, at least one.
            tables: the request's block ids, a list for each cache group.
            start: number of the prompt's blocks before them.
        """
        end = start + len(blocks)
        ids = [*tables[self.attention][start:end]]
        ids += [tables[group][end - 1] for group in self.recurrent]
        return ids, [*blocks, *self.names(blocks[-1])]
