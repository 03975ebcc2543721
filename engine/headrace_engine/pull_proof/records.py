"""The producer's records of its hand-outs: the row of each, and the memory that holds the rows.

`Grants` gives rows to hand-outs (the scheduler's side), `RecordTable` is the memory (the worker's
side; one for each rank). A row is a record of 64 bytes and room for one fingerprint a block:

    row = record, u64[blocks of the longest prompt]

Rows are used again, generations are not. Pure but for the anonymous memory.
"""

from __future__ import annotations

import mmap
import threading
from collections import deque
from dataclasses import dataclass

import numpy as np

from headrace_engine.pull_proof.identity import (
    NO_SUMS,
    RECORD,
    RECORD_BYTES,
    SUMMED,
    Identity,
)
from headrace_engine.pull_proof.settings import Sampling

MAX_ROWS, MIN_ROWS = 4096, 128
TABLE_BYTES = 16 * 2**20
_STATE = slice(52, 56)


@dataclass(frozen=True, slots=True)
class Geometry:
    """Size of a table."""

    rows: int
    row_bytes: int

    @classmethod
    def of(cls, longest_prompt: int, block_tokens: int) -> Geometry:
        """Return the size for an engine: as many rows as `TABLE_BYTES` hold, within bounds. As many
        hand-outs can be out at once."""
        blocks = -(-longest_prompt // block_tokens)
        row_bytes = RECORD_BYTES * (1 + -(-8 * blocks // RECORD_BYTES))
        rows = min(MAX_ROWS, max(MIN_ROWS, TABLE_BYTES // row_bytes))
        return cls(rows, row_bytes)

    @property
    def sums(self) -> int:
        """Fingerprints that a row has room for."""
        return (self.row_bytes - RECORD_BYTES) // 8

    @property
    def nbytes(self) -> int:
        """Bytes of the table."""
        return self.rows * self.row_bytes


class Grants:
    """Gives each hand-out a generation and a row.

    Args:
        rows: number of rows of the table.
        incarnation: of the engine (`Identity.incarnation`).
        sampling: which hand-outs are checked.
    """

    def __init__(self, rows: int, incarnation: bytes, sampling: Sampling) -> None:
        self._free = deque(range(rows))
        self._incarnation, self._sampling = incarnation, sampling
        self._held: dict[str, tuple[int, Identity]] = {}
        self._generation = 0

    def __len__(self) -> int:
        return len(self._held)

    def begin(
        self, request_id: str, digest: bytes, tokens: int, demanded: bool = False
    ) -> tuple[int, Identity] | None:
        """Return row and identity of a request whose blocks will be handed out; the same ones if it
        has them already. None if no row is free: its blocks cannot be handed out.

        Args:
            demanded: the puller wants fingerprints.
        """
        held = self._held.get(request_id)
        if held is not None:
            return held
        if not self._free:
            return None
        self._generation += 1
        checked = self._sampling.choose(demanded)
        identity = Identity(self._incarnation, self._generation, digest, tokens, checked)
        # The row that was freed longest ago: a late reader finds its record erased, not another's.
        self._held[request_id] = held = (self._free.popleft(), identity)
        return held

    def held(self, request_id: str) -> tuple[int, Identity] | None:
        """Return what `begin` returned for a request; None after `end`."""
        return self._held.get(request_id)

    def end(self, request_id: str) -> int | None:
        """Free the row of a request whose blocks are free or were never handed out. Return the row,
        if there was one."""
        held = self._held.pop(request_id, None)
        if held is None:
            return None
        self._free.append(held[0])
        return held[0]


class RecordTable:
    """The memory that pullers read. Used by the engine's thread and the fingerprints' thread."""

    def __init__(self, geometry: Geometry) -> None:
        self.geometry = geometry
        self._memory = np.frombuffer(mmap.mmap(-1, geometry.nbytes), np.uint8)
        self._rows = self._memory.reshape(geometry.rows, geometry.row_bytes)
        self._lock = threading.Lock()

    @property
    def address(self) -> int:
        """Address of row 0, aligned to a page."""
        return int(self._memory.ctypes.data)

    def write(self, row: int, record: bytes) -> None:
        """Write the record of a hand-out that begins."""
        with self._lock:
            self._rows[row, :RECORD_BYTES] = np.frombuffer(record, np.uint8)

    def erase(self, row: int) -> None:
        """Erase the record of a hand-out that ends. After the return no puller can prove it."""
        with self._lock:
            self._rows[row, :RECORD_BYTES] = 0

    def put_sums(self, row: int, generation: int, sums: np.ndarray | None) -> bool:
        """Publish fingerprints, u64 [blocks], or with None that there will be none. Return False if
        the hand-out has ended."""
        with self._lock:
            record = self._rows[row, : RECORD.size]
            if RECORD.unpack(record.tobytes())[4] != generation:
                return False
            state = NO_SUMS
            if sums is not None and len(sums) <= self.geometry.sums:
                there = self._rows[row, RECORD_BYTES : RECORD_BYTES + 8 * len(sums)]
                there[:] = sums.view(np.uint8)
                state = SUMMED
            # Four aligned bytes, stored at once and after the sums.
            record[_STATE].view(np.uint32)[0] = state
            return True

    def row(self, row: int) -> bytes:
        """Return a row as a puller reads it."""
        return self._rows[row].tobytes()
