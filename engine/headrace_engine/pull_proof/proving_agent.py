"""A NIXL agent that reports a read as done only when the read is proved.

It takes the place of the agent of vLLM's connector. It makes a read of KV as vLLM asks, but without
vLLM's notification, which would let the producer free the blocks. When the bytes have arrived, it
reads the hand-out's record (`identity.believe`). For a checked hand-out it also reads the
fingerprints, and compares them with those of the blocks that arrived. Only then it notifies the
producer and reports the read as done. If the proof fails, it reports the read as failed, and vLLM
computes the KV that should have been pulled.

    DATA -> RECORD -> DONE                          each transfer
              `-> SUMS -> COMPARE -> DONE           of a checked hand-out

No call waits for KV or fingerprints: each check handles what has happened since the last one. Only
for a record, which takes some tens of microseconds, a check waits: otherwise a whole step of the
engine would pass until the next check. `SPIN_S` bounds the wait for all transfers of a step
together.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import Enum
from types import SimpleNamespace
from typing import Any, Protocol

import numpy as np

from headrace_engine.pull_proof.identity import (
    RECORD_BYTES,
    SUMMED,
    UNSUMMED,
    Claim,
    Unproved,
    believe,
)

logger = logging.getLogger("headrace.engine")

SPIN_S = 0.001
"""Maximum wait for records in one step of the engine."""
SPIN_NAP_S = 20e-6
TELEMETRY = "startTime", "postDuration", "xferDuration", "totalBytes", "descCount"
"""Fields of NIXL's telemetry of a transfer."""
SLOTS = 32
"""Maximum number of records that are read at once; further ones wait for the next step."""


class Sums(Protocol):
    """Maker of fingerprints of the blocks that arrived."""

    def start(self, blocks: Sequence[int], positions: Sequence[int], claim: Claim) -> Future[Any]:
        """Start to make the fingerprints, u64 [n], of blocks by their ids in this engine."""


@dataclass(frozen=True, slots=True)
class Pull:
    """One read of one rank's blocks."""

    request_id: str
    engine: str
    """The producer's id."""
    agent: str
    """NIXL's name of the producer's agent."""
    record_at: int
    """The record's address in the producer's memory."""
    claim: Claim
    blocks: Sequence[int]
    """Blocks of this engine that the read fills, in the prompt's order."""
    positions: Sequence[int]
    """Their positions in the prompt. Empty, as `blocks`, where the two engines' blocks cannot be
    compared."""
    pieces: int = 1
    """`compatibility.pieces` of the two engines."""


class Stage(Enum):
    DATA, RECORD, SUMS, COMPARE, DONE = range(5)


@dataclass(slots=True, eq=False)
class _Read:
    """A pull under way."""

    pull: Pull
    handle: Any
    notification: bytes
    begun_s: float
    stage: Stage = Stage.DATA
    arrived_s: float = 0.0
    """Time at which the bytes were found to have arrived."""
    reading: _RowRead | None = None
    theirs: np.ndarray | None = None
    ours: Future[Any] | None = None
    outcome: str | None = None
    checked: bool = False


@dataclass(slots=True)
class _RowRead:
    """A read of a record into a slot."""

    slot: int
    nbytes: int
    handle: Any


@dataclass
class Outcomes:
    """Results of pulls that were not taken yet."""

    proved: list[tuple[float, bool]] = field(default_factory=list)
    """Seconds from the arrival of the bytes to the proof; whether fingerprints were compared."""
    failed: dict[str, Unproved] = field(default_factory=dict)
    """Reasons of failed pulls, by request id."""


class ProvingAgent:
    """Wrapper of vLLM's NIXL agent, with the same methods.

    Args:
        agent: NIXL's; memory for the records that are read is registered with it.
        row_bytes: size of a row in the producers' tables.
        sums: makes fingerprints of the blocks that arrived; None where this engine can make none.
        timeout_s: maximum time from the arrival of the bytes to the proof.
        demand: refuse checked hand-outs whose producer could not make fingerprints.
    """

    def __init__(
        self,
        agent: Any,
        row_bytes: int,
        sums: Sums | None,
        timeout_s: float,
        *,
        demand: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._agent, self._sums, self._timeout_s = agent, sums, timeout_s
        self._demand, self._clock = demand, clock
        self._landing = np.zeros((SLOTS, row_bytes), np.uint8)
        self.registered = agent.register_memory(
            [(self._landing.ctypes.data, self._landing.nbytes, 0, "")], mem_type="DRAM"
        )
        self._free = list(range(SLOTS))
        self._strays: list[_RowRead] = []
        self._reads: dict[Any, _Read] = {}
        self._of_request: dict[str, list[_Read]] = {}
        self._pull: Pull | None = None
        self._spin_left_s = SPIN_S
        self.outcomes = Outcomes()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._agent, name)

    def new_step(self) -> None:
        """Begin a step's checks: reset the bound of their waits, and free slots of ended reads."""
        self._spin_left_s = SPIN_S
        self._strays = [read for read in self._strays if not self._landed(read)]

    def take_proved(self) -> list[tuple[float, bool]]:
        """Return `Outcomes.proved` since the last call."""
        taken, self.outcomes.proved = self.outcomes.proved, []
        return taken

    def hanging(self, limit_s: float) -> set[str]:
        """Return the producers whose bytes have been on their way for longer than `limit_s`."""
        latest = self._clock() - limit_s
        return {
            read.pull.engine
            for read in self._reads.values()
            if read.stage is Stage.DATA and read.outcome is None and read.begun_s < latest
        }

    @contextlib.contextmanager
    def pulling(self, pull: Pull) -> Iterator[None]:
        """Treat the read that is made within as this pull."""
        self._pull = pull
        try:
            yield
        finally:
            self._pull = None

    # What vLLM calls

    def make_prepped_xfer(
        self,
        operation: str,
        local: Any,
        local_ids: Any,
        remote: Any,
        remote_ids: Any,
        notif_msg: bytes = b"",
        **more: Any,
    ) -> Any:
        pull, self._pull = self._pull, None
        args = operation, local, local_ids, remote, remote_ids
        if pull is None or operation != "READ":
            return self._agent.make_prepped_xfer(*args, notif_msg=notif_msg, **more)
        handle = self._agent.make_prepped_xfer(*args, **more)
        self._reads[handle] = read = _Read(pull, handle, notif_msg, self._clock())
        self._of_request.setdefault(pull.request_id, []).append(read)
        return handle

    def check_xfer_state(self, handle: Any) -> str:
        read = self._reads.get(handle)
        if read is None:
            return str(self._agent.check_xfer_state(handle))
        if read.outcome is None:
            read.outcome = self._look(read)
        siblings = self._of_request.get(read.pull.request_id, ())
        if read.outcome == "ERR" and any(other.outcome is None for other in siblings):
            return "PROC"  # its blocks are not to be computed while another rank's bytes arrive
        return read.outcome or "PROC"

    def get_xfer_telemetry(self, handle: Any) -> Any:
        told, read = self._agent.get_xfer_telemetry(handle), self._reads.get(handle)
        if read is None:
            return told
        known = {name: getattr(told, name) for name in TELEMETRY}
        return SimpleNamespace(**known, pieces=read.pull.pieces)

    def release_xfer_handle(self, handle: Any) -> None:
        read = self._reads.pop(handle, None)
        if read is not None:
            self._give_up(read.reading)
            siblings = self._of_request[read.pull.request_id]
            siblings.remove(read)
            if not siblings:
                del self._of_request[read.pull.request_id]
        self._agent.release_xfer_handle(handle)

    # The proof

    def _look(self, read: _Read) -> str | None:
        """Advance a read. Return DONE or ERR, or None while it continues."""
        try:
            while self._advance(read):
                pass
            return "DONE" if read.stage is Stage.DONE else None
        except Unproved as error:
            why = error
        except Exception as error:  # NIXL reports a lost peer by exceptions of its own
            why = Unproved("unreachable", f"the transfer failed ({type(error).__name__}: {error})")
        self.outcomes.failed[read.pull.request_id] = why
        logger.warning("pulled KV is not used: %s", why, extra={"request_id": read.pull.request_id})
        if why.kind == "content":
            self._notify(read)  # no other code does
        return "ERR"

    def _advance(self, read: _Read) -> bool:
        """Advance a read by one stage. Return False if it has to wait."""
        if read.stage is Stage.DATA:
            return self._data(read)
        late = self._clock() - read.arrived_s > self._timeout_s
        moved = self._compare(read) if read.stage is Stage.COMPARE else self._row(read)
        if not moved and late and read.stage is not Stage.DONE:
            raise Unproved("late", f"no proof within {self._timeout_s:g} s")
        return moved

    def _data(self, read: _Read) -> bool:
        state = self._agent.check_xfer_state(read.handle)
        if state == "PROC":
            return False
        if state != "DONE":
            raise Unproved("unreachable", f"the transfer ended as {state}")
        read.stage, read.arrived_s = Stage.RECORD, self._clock()
        pull = read.pull
        if pull.claim.identity.checked and self._sums is not None and len(pull.blocks):
            read.ours = self._sums.start(pull.blocks, pull.positions, pull.claim)
        return True

    def _row(self, read: _Read) -> bool:
        """Read the record, and the fingerprints with it once they are there."""
        pull = read.pull
        if read.reading is None:
            sums = max(pull.positions, default=-1) + 1 if read.stage is Stage.SUMS else 0
            read.reading = self._read_row(pull, RECORD_BYTES + 8 * sums)
            if read.reading is None:
                return False
        found = self._wait_for(read.reading)
        if found is None:
            return False
        read.reading = None
        state = believe(pull.claim.identity, found[:RECORD_BYTES].tobytes())
        if not pull.claim.identity.checked or (read.ours is None and not self._demand):
            return self._proved(read)
        if read.stage is Stage.SUMS:
            every = found[RECORD_BYTES:].view(np.uint64)
            read.theirs, read.stage = every[np.asarray(pull.positions, np.int64)], Stage.COMPARE
            return True
        if state == SUMMED and read.ours is not None:
            read.stage = Stage.SUMS
            return True
        if state == UNSUMMED:
            return False  # read again at the next check
        if self._demand:
            raise Unproved("late", "fingerprints cannot be made, and integrity.check is all")
        return self._proved(read)

    def _compare(self, read: _Read) -> bool:
        assert read.ours is not None and read.theirs is not None
        if not read.ours.done():
            return False
        wrong = np.flatnonzero(read.ours.result() != read.theirs)
        if len(wrong):
            raise Unproved("content", f"{len(wrong)} of {len(read.theirs)} blocks differ")
        read.checked = True
        return self._proved(read)

    def _proved(self, read: _Read) -> bool:
        self._notify(read)
        self.outcomes.proved.append((self._clock() - read.arrived_s, read.checked))
        read.stage = Stage.DONE
        return False

    def _notify(self, read: _Read) -> None:
        """Tell the producer that it may free the blocks. If that fails, its lease ends."""
        try:
            self._agent.send_notif(read.pull.agent, notif_msg=read.notification)
        except Exception:
            logger.warning(
                "a prefill engine cannot be told that its KV was pulled; its lease will end",
                exc_info=True,
            )

    # Reads of records

    def _read_row(self, pull: Pull, nbytes: int) -> _RowRead | None:
        """Start to read a row of the producer's table. Return None if no slot is free."""
        if not self._free:
            return None
        if nbytes > self._landing.shape[1]:
            raise Unproved("range", "more blocks than a record has room for")
        slot = self._free.pop()
        try:
            ends = [(self._landing[slot].ctypes.data, pull.record_at)]
            local, remote = (
                self._agent.get_xfer_descs([(at, nbytes, 0)], mem_type="DRAM") for at in ends[0]
            )
            handle = self._agent.initialize_xfer("READ", local, remote, pull.agent)
        except BaseException:
            self._free.append(slot)
            raise
        reading = _RowRead(slot, nbytes, handle)
        try:
            self._agent.transfer(handle)
        except BaseException:
            self._give_up(reading)
            raise
        return reading

    def _wait_for(self, reading: _RowRead) -> np.ndarray | None:
        """Return a copy of the row, or None if it has not arrived when the step's wait is over."""
        state = self._agent.check_xfer_state(reading.handle)
        while state == "PROC" and self._spin_left_s > 0:
            started = time.perf_counter()
            time.sleep(SPIN_NAP_S)
            state = self._agent.check_xfer_state(reading.handle)
            self._spin_left_s -= time.perf_counter() - started
        if state == "PROC":
            return None
        if state != "DONE":
            raise Unproved("unreachable", f"the record's transfer ended as {state}")
        found = self._landing[reading.slot, : reading.nbytes].copy()
        self._agent.release_xfer_handle(reading.handle)
        self._free.append(reading.slot)
        return found

    def _give_up(self, reading: _RowRead | None) -> None:
        """Abandon the read of a row. Its slot is free again when NIXL has ended the transfer."""
        if reading is not None and not self._landed(reading):
            self._strays.append(reading)

    def _landed(self, reading: _RowRead) -> bool:
        with contextlib.suppress(Exception):
            if self._agent.check_xfer_state(reading.handle) == "PROC":
                return False
        with contextlib.suppress(Exception):
            self._agent.release_xfer_handle(reading.handle)
        self._free.append(reading.slot)
        return True
