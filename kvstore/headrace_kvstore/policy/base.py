"""The interface of an eviction policy, which chooses the slots of a table to give up next.

A policy reads the slot table (`slot_record.SLOT`) and arrays of its own. It reads no clock, does no
I/O and starts no thread, so every process that maps the arena can evict, and the simulator replays
the code that production runs. Its caller lets one process in at a time (`SharedPolicy`).

`prompt` reports each prompt. When room is short, `choose` names the slots to give up.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from headrace_kvstore.blocks.slot_record import READY, SLOT

Table = NDArray[np.void]
"""Slot records, shape (slots,), dtype `slot_record.SLOT`."""

Slots = NDArray[np.int64]
"""Indices into a table."""

Mask = NDArray[np.bool_]
"""bool (slots,)."""

Keys = NDArray[np.uint64]
"""Block keys as policies use them: `block_keys`."""

AGED_S = 600.0

_HASH_OFFSET = SLOT.fields["hash"][1]  # type: ignore[index]
_SPREAD = np.uint64(0x9E3779B97F4A7C15)  # odd, so that no two namespaces share an addend


def block_keys(namespace: NDArray[np.uint16] | int, head: NDArray[np.uint64]) -> Keys:
    """Return one u64 a block: the first 8 bytes of its hash, combined with its namespace's row.

    Two blocks that collide share a reuse history; no bytes depend on it.
    """
    offset = np.asarray(namespace, dtype=np.uint64) * _SPREAD
    return np.asarray(head, dtype=np.uint64) ^ offset


def slot_keys(table: Table, namespace: int | None = None) -> Keys:
    """Return `block_keys` of every slot, by the given namespace's row instead of the slots' own."""
    owner = table["namespace"] if namespace is None else namespace
    return block_keys(owner, hash_words(table))


def hash_words(table: Table) -> NDArray[np.uint64]:
    """Return the first 8 bytes of each slot's block hash, in the form of `parent`."""
    return np.asarray(table.getfield(np.dtype("<u8"), _HASH_OFFSET))


def parent_keys(table: Table) -> Keys:
    """Return `block_keys` of every slot's parent."""
    return block_keys(table["namespace"], table["parent"])


def evictable(table: Table, now_s: float) -> NDArray[np.bool_]:
    """Return which slots may be given up: complete, not kept, and without a reader's lease."""
    free = (table["kept_until_s"] <= now_s) & (table["lease_until_s"] <= now_s)
    return np.asarray((table["state"] == READY) & free)


class Policy:
    """Base of the policies, which learns nothing. Subclasses must implement only `choose`."""

    name = ""
    learns = False
    """Whether `prompt` does anything."""

    def prompt(self, keys: Keys, now_s: float) -> None:
        """Learn that a prompt arrived whose full blocks have these keys, root first."""

    def choose(self, table: Table, now_s: float, need: int, among: Mask | None = None) -> Slots:
        """Return up to `need` slots to give up, worst first, and only slots in `among` if that is
        given.

        The result is shorter if the other slots are leased, kept or being written. A block never
        comes before one that needs it, unless the latter is given up too.
        """
        raise NotImplementedError

    def rates(self, keys: Keys, rows: Table, now_s: float) -> NDArray[np.float64]:
        """Return the hits per second to expect of blocks, here or in another tier: float64 (n,).

        Reads only, and may be called outside the section. rows: SLOT (n,), of which `used_s`,
        `stored_s` and `hits` count. A policy that learns nothing gives the highest rates to blocks
        used often and lately.
        """
        return proven_rate(rows, now_s) + 1.0 / (
            AGED_S + np.maximum(0.0, now_s - rows["used_s"].astype(np.float64))
        )

    def set_load_cost(self, medium: str, seconds_per_byte: float) -> None:
        """Learn the seconds to load one more byte from "dram" or "nvme". Takes no lock."""

    def seconds_per_byte(self, medium: str) -> float:
        """Return the last value of `set_load_cost`; 0 if nothing was measured."""
        return 0.0

    def reset_history(self) -> None:
        """Start again without history, whatever bytes the policy's own arrays hold."""


def proven_rate(rows: Table, now_s: float) -> NDArray[np.float64]:
    """Return each block's hits per second since it was stored; `AGED_S` is added to its age."""
    age_s = np.maximum(0.0, now_s - rows["stored_s"].astype(np.float64))
    return np.asarray(rows["hits"] / (AGED_S + age_s), np.float64)


def saved_s(rows: Table, seconds_per_byte: float) -> NDArray[np.float64]:
    """Return the seconds that loading each block from a tier saves over computing it, (n,), at
    least 0.

    For a block without `compute_s`, the others' total seconds per byte are assumed. If no
    block has `compute_s`, all cost the same a byte, and only the order of the results has a
    meaning.

    Args:
        seconds_per_byte: of a load from the tier; 0 while it is not known.
    """
    size, known_s = rows["bytes"].astype(np.float64), rows["compute_s"].astype(np.float64)
    known = known_s > 0.0
    known_bytes = size[known].sum()
    usual_s = known_s[known].sum() / known_bytes if known_bytes > 0.0 else 1.0
    compute_s = np.where(known, known_s, usual_s * size)
    return np.asarray(np.maximum(compute_s - seconds_per_byte * size, 0.0), np.float64)


def candidates(table: Table, now_s: float, among: Mask | None) -> Mask:
    """Return the `evictable` slots `among` those given."""
    may_go = evictable(table, now_s)
    return may_go if among is None else may_go & among
