"""An engine's prefix cache as vLLM keeps it: whole blocks by their chained hashes, the least
recently used evicted first. Only numbers: no KV is held. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

Key = bytes


class Change(NamedTuple):
    """A block can be hit from now on, or no longer. `parent`: the one before it, if any."""

    stored: bool
    key: Key
    parent: Key | None = None


class PrefixCache:
    """Blocks of one engine.

    A block is *held* by running requests, *idle* if no running request needs it but it can still be
    hit, *plain* if it belongs to a request and cannot be hit (its end is not computed yet, or
    another block with the same tokens came first), or free.

    Attributes:
        changes: blocks that were added and removed, in order. The reporter empties it.
    """

    def __init__(self, blocks: int) -> None:
        if blocks < 1:
            raise ValueError(f"a cache has at least 1 block, not {blocks}")
        self.blocks = blocks
        self._held: dict[Key, int] = {}
        self._idle: dict[Key, None] = {}
        self._plain = 0
        self.changes: list[Change] = []

    def __len__(self) -> int:
        """Blocks that can be hit."""
        return len(self._held) + len(self._idle)

    @property
    def available(self) -> int:
        """Blocks that a new request can have: the free ones and the idle ones."""
        return self.blocks - len(self._held) - self._plain

    def keys(self) -> list[Key]:
        """All blocks that can be hit."""
        return [*self._held, *self._idle]

    def match(self, keys: Sequence[Key]) -> int:
        """Return how many leading blocks can be hit."""
        for number, key in enumerate(keys):
            if key not in self._held and key not in self._idle:
                return number
        return len(keys)

    def room(self, keys: Sequence[Key], more: int) -> bool:
        """Return whether `more` blocks are available beside `keys`, which can be hit."""
        idle = sum(key in self._idle for key in keys)
        return self.available - idle >= more

    def hold(self, keys: Sequence[Key]) -> None:
        """A request needs these blocks, all of which can be hit."""
        for key in keys:
            if key in self._idle:
                del self._idle[key]
                self._held[key] = 1
            else:
                self._held[key] += 1

    def take(self, count: int) -> None:
        """Give plain blocks to a request, evicting idle ones as it takes.

        Raises:
            ValueError: so many are not available.
        """
        if count > self.available:
            raise ValueError(f"{count} blocks are wanted, {self.available} are available")
        self._plain += count
        for _ in range(len(self) + self._plain - self.blocks):
            key = next(iter(self._idle))
            del self._idle[key]
            self.changes.append(Change(False, key))

    def fill(self, key: Key, parent: Key | None) -> bool:
        """A plain block has been computed. Whether it is now held under its key: not if there is
        one like it; then it stays plain."""
        if key in self._held or key in self._idle:
            return False
        self._plain -= 1
        self._held[key] = 1
        self.changes.append(Change(True, key, parent))
        return True

    def release(self, keys: Sequence[Key], plain: int) -> None:
        """A request has ended. The last blocks of its prompt become the first to go."""
        self._plain -= plain
        for key in reversed(keys):
            if self._held[key] == 1:
                del self._held[key]
                self._idle[key] = None
            else:
                self._held[key] -= 1
