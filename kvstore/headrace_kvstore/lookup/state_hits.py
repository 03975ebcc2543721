"""Hits of engines with recurrent layers (Mamba, GDN): prefixes with a state after them.

The attention layers' block of a position has vLLM's block hash as its name. The state of each cache
group of recurrent layers after it has a name made of that one and of the group's number. A prefix
of n blocks is a hit if all n blocks are stored, and the state of each group after the last of them.
Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import compress

from headrace_kvstore.identity.namespace import owned_name

ASKED_AT_ONCE = 64
"""Number of positions that are asked for at once, from the end of a prefix on."""
MAX_STATES = 1024
"""Maximum number of states that a node is asked for at once."""


@dataclass(frozen=True)
class StateHits:
    """Names and hits of one engine.

    Attributes:
        recurrent: numbers of the cache groups of recurrent layers, at least one.
    """

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

    def last_names(self, blocks: Sequence[bytes]) -> list[bytes]:
        """Return the names of the states after the last ones of these blocks, for one question to a
        node."""
        some = blocks[-max(1, MAX_STATES // len(self.recurrent)) :]
        return [name for block in some for name in self.names(block)]

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
