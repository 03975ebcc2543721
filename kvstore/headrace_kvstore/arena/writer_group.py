"""Writers of an arena's slots: a process alone, or the workers of an engine together.

A slot that is being filled has an owner, and a bit for each of its writers that is not done. A
process that writes alone owns its slots by its pid. Workers that fill slots together own
them under their group's number, below 0, by which each of them finds the slots that another has
begun.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from typing import NamedTuple

from headrace_kvstore.blocks.slot_record import MAX_WRITERS


@dataclass(frozen=True, slots=True)
class Writer:
    """One of the processes that fill slots together.

    Attributes:
        group: identifies the group on this machine; below 0.
        number: of this writer, from 0 on. count: of all writers, at most MAX_WRITERS.
    """

    group: int
    number: int
    count: int


class WriterToken(NamedTuple):
    """Values that a writer puts into slots: their owner, its bit of `pending_writers`, and all
    bits."""

    owner: int
    bit: int
    pending_writers: int

    @classmethod
    def of(cls, writer: Writer | None) -> WriterToken:
        """Return a writer's values, or this process's own. Raises ValueError for an impossible
        writer."""
        if writer is None:
            return cls(os.getpid(), 1, 1)
        if writer.group >= 0 or not 0 <= writer.number < writer.count <= MAX_WRITERS:
            raise ValueError(f"no writer of a group: {writer}")
        return cls(writer.group, 1 << writer.number, (1 << writer.count) - 1)


def writer_group_id(name: str) -> int:
    """Return a group's number, from a name that its members share and no other group has."""
    digest = hashlib.blake2b(name.encode(), digest_size=4).digest()
    return -1 - int.from_bytes(digest, "little") % 2**31
