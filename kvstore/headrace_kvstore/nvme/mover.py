"""Moves bytes between local memory and files through NIXL, many pieces at once.

A *move* is a scatter list: piece i is `lengths[i]` bytes at memory address `addresses[i]` and at
`offsets[i]` of file `fds[i]`. The caller keeps memory and files alive until the move is done.

NIXL's agents are not thread-safe, so each belongs to one thread here. Reads and writes have an
agent each (a *lane*): a full disk does not fail reads, and reads do not queue behind saves. A lane
posts at most `FLYING_PIECES` at a time, polls while something flies, and sleeps otherwise. NIXL's
own progress thread, which never sleeps, is off: the POSIX backend has no use for it.

What NIXL 1.3.2's POSIX backend does not do is done here, as far as it can be:
- It calls a short read or write done. So file sizes are compared afterwards.
- Its Linux AIO queue calls a *failed* read or write done. Its other two queues tell of failures.
- After a failure that it tells of, its queue has lost other completions. So the lane gets a new
  agent, and what was in flight is done again, piece by piece with plain system calls. That
  finishes the innocent pieces and tells the errno of the guilty ones, which NIXL only logs.
- It cannot take back I/O in flight. So `Move.call_off` only keeps the rest from being posted.

Which queue: the three are about equally fast (io_uring and Linux AIO; POSIX AIO a quarter slower).
- Writes take io_uring, or POSIX AIO where containers forbid io_uring: nobody reads back what was
  written, so a failure must be told. A broken agent is kept for ever, unused, since both queues
  let go of I/O in flight without waiting for it; a write that is late changes nobody's memory.
- Reads take Linux AIO: a failed read must be found by checksum, as a flipped bit must. In return
  its end waits for everything in flight, so that no late read lands in memory given back already.
  It is asynchronous only for files opened with O_DIRECT; else posting itself reads the pages.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import stat
import threading
import time
import uuid
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

logger = logging.getLogger("headrace.kvstore")

Operation = Literal["READ", "WRITE"]

SLICE_PIECES = 256
"""Pieces posted as one NIXL transfer."""
FLYING_PIECES = 1024
"""Pieces in flight a lane, at most. More than `ios_pool_size` NIXL refuses; of more than twice the
`kernel_queue_size` it may never see io_uring's completions, those that the ring had no room for."""

_POOL = {"ios_pool_size": str(2 * FLYING_PIECES)}
POSIX_OPTIONS = {
    "READ": [{"use_aio": "true", "kernel_queue_size": "128", **_POOL}],
    "WRITE": [
        {"use_uring": "true", "kernel_queue_size": str(FLYING_PIECES), **_POOL},
        {"use_posix_aio": "true", **_POOL},
    ],
}
"""Backend parameters for each direction, the first that works."""
FIRST_PAUSE_S, LAST_PAUSE_S = 50e-6, 400e-6
"""Sleep between polls: doubled from the first to the last while nothing finishes. A poll submits
and reaps up to 64 pieces."""
WHOLE_FILE_BYTES = 1 << 62
_BROKEN_AGENTS: list[Any] = []
"""Never used again, never ended: see above."""


class MoveError(OSError):
    """Some pieces did not move; `pieces` maps their positions in the scatter list to the reason."""

    def __init__(self, operation: str, pieces: Mapping[int, OSError]) -> None:
        first = next(iter(pieces.values()))
        super().__init__(
            first.errno, f"{operation} failed for {len(pieces)} pieces, first: {first}"
        )
        self.pieces = dict(pieces)


class Move(Future[None]):
    """A scatter list on its way. A future: raises `MoveError`, or CancelledError if called off.

    Callbacks run on the lane's thread and must not block.
    """

    def __init__(
        self,
        operation: Operation,
        addresses: np.ndarray,
        fds: np.ndarray,
        offsets: np.ndarray,
        lengths: np.ndarray,
    ) -> None:
        super().__init__()
        self.operation: Operation = operation
        self.addresses, self.fds, self.offsets, self.lengths = addresses, fds, offsets, lengths
        self.bytes = int(lengths.sum())
        self.called_off = False
        self.posted = self.landed = 0
        self.errors: dict[int, OSError] = {}
        self.set_running_or_notify_cancel()

    @property
    def pieces(self) -> int:
        """Length of the scatter list."""
        return len(self.lengths)

    def call_off(self) -> None:
        """Post no more of it. It is done, and its memory free, once what is in flight landed."""
        self.called_off = True

    @property
    def over(self) -> bool:
        """Nothing is in flight, and nothing more will be posted."""
        return self.landed == self.posted and (self.called_off or self.posted == self.pieces)


@dataclass
class _Slice:
    move: Move
    first: int
    count: int
    handle: Any


class Mover:
    """Reads and writes files from and to local memory with one NIXL backend.

    Args:
        backend: "POSIX", or "GDS_MT" to move between files and GPU memory.
        memory: where local addresses are: "DRAM", or "VRAM" (GDS_MT only).
        options: the backend's own parameters, for both directions; None takes this module's choice.
        device: GPU index of VRAM addresses.

    Raises:
        ImportError: NIXL is not installed.
        RuntimeError: the backend cannot be made here.
    """

    def __init__(
        self,
        backend: str = "POSIX",
        memory: Literal["DRAM", "VRAM"] = "DRAM",
        options: Mapping[str, str] | None = None,
        device: int = 0,
    ) -> None:
        if memory == "VRAM" and backend == "POSIX":
            raise ValueError("the POSIX backend moves host memory only; VRAM needs GDS_MT")
        self.backend, self.memory, self.device = backend, memory, device
        self.options: Mapping[str, Sequence[Mapping[str, str]]]
        if options is None and backend == "POSIX":
            self.options = POSIX_OPTIONS
        else:
            self.options = {each: [dict(options or {})] for each in POSIX_OPTIONS}
        self._lanes: dict[str, _Lane] = {}
        try:
            for operation, choices in self.options.items():
                self._lanes[operation] = _Lane(self, operation, choices)
        except BaseException:
            self.close()
            raise

    def register(self, address: int, length: int) -> None:
        """Let moves use `length` bytes of memory at `address`, until `deregister`."""
        for lane in self._lanes.values():
            lane.register(self.memory, (address, length, self.device))

    def deregister(self, address: int, length: int) -> None:
        """Take back `register`; no move may be using the memory."""
        for lane in self._lanes.values():
            lane.deregister(self.memory, (address, length, self.device))

    def attach(self, fd: int) -> None:
        """Let moves use an open file, until `detach`, which must come before it is closed."""
        for lane in self._lanes.values():
            lane.register("FILE", (0, WHOLE_FILE_BYTES, fd))

    def detach(self, fd: int) -> None:
        """Take back `attach`; no move may be using the file."""
        for lane in self._lanes.values():
            lane.deregister("FILE", (0, WHOLE_FILE_BYTES, fd))

    def read(self, addresses: Any, fds: Any, offsets: Any, lengths: Any) -> Move:
        """Start filling memory from files; each argument is one number a piece."""
        return self._start("READ", addresses, fds, offsets, lengths)

    def write(self, addresses: Any, fds: Any, offsets: Any, lengths: Any) -> Move:
        """Start writing memory to files; each argument is one number a piece."""
        return self._start("WRITE", addresses, fds, offsets, lengths)

    def _start(self, operation: Operation, *columns: Sequence[int] | np.ndarray) -> Move:
        arrays = [np.ascontiguousarray(column, dtype=np.uint64).reshape(-1) for column in columns]
        if len({len(array) for array in arrays}) != 1:
            raise ValueError(f"columns of unequal length: {[len(array) for array in arrays]}")
        move = Move(operation, *arrays)
        if move.pieces == 0:
            move.set_result(None)
        else:
            self._lanes[operation].submit(move)
        return move

    def close(self, timeout_s: float = 30.0) -> bool:
        """Call everything off, wait for what is in flight, give everything back.

        Returns False if the disk kept something past `timeout_s`; it is then left behind.
        """
        deadline = time.monotonic() + timeout_s
        for lane in self._lanes.values():
            lane.stop()
        ended = [lane.join(deadline - time.monotonic()) for lane in self._lanes.values()]
        return all(ended)


class _Lane:
    """One NIXL agent, one thread, one direction."""

    def __init__(self, mover: Mover, operation: str, choices: Sequence[Mapping[str, str]]) -> None:
        self._mover, self._choices = mover, choices
        self._waits_at_end = all("use_aio" in options for options in choices)
        self._agent_lock = threading.Lock()
        self._registered: dict[tuple[str, tuple[int, int, int]], Any] = {}
        self._agent: Any = None
        self._make_agent()
        self._wake = threading.Condition()
        self._queue: deque[Move] = deque()
        self._flying: list[_Slice] = []
        self._flying_pieces = 0
        self._stopping = False
        name = f"mover-{mover.backend}-{operation}".lower()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    # Called from any thread.

    def submit(self, move: Move) -> None:
        with self._wake:
            if not self._stopping:
                self._queue.append(move)
                self._wake.notify()
                return
        move.set_exception(CancelledError("the mover is closed"))

    def register(self, kind: str, section: tuple[int, int, int]) -> None:
        with self._agent_lock:
            if (kind, section) not in self._registered:
                self._registered[kind, section] = self._register(kind, section)

    def deregister(self, kind: str, section: tuple[int, int, int]) -> None:
        with self._agent_lock:
            handle = self._registered.pop((kind, section), None)
            if handle is not None and self._agent is not None:
                self._agent.deregister_memory(handle)

    def stop(self) -> None:
        with self._wake:
            self._stopping = True
            for move in self._queue:
                move.call_off()
            self._wake.notify()

    def join(self, timeout_s: float) -> bool:
        self._thread.join(max(0.0, timeout_s))
        return not self._thread.is_alive()

    # The agent; `_agent_lock` is held, or nobody else knows the lane yet.

    def _make_agent(self) -> None:
        from nixl._api import nixl_agent, nixl_agent_config

        backend, errors = self._mover.backend, []
        for options in self._choices:
            config = nixl_agent_config(enable_prog_thread=False, backends=[])
            agent = nixl_agent(f"headrace-{uuid.uuid4()}", config)
            try:
                agent.create_backend(backend, dict(options))
            except Exception as error:
                errors.append(f"{dict(options)}: {error!r}")
                continue
            self._agent = agent
            for kind, section in self._registered:
                self._registered[kind, section] = self._register(kind, section)
            return
        raise RuntimeError(f"NIXL backend {backend} cannot be made: {'; '.join(errors)}")

    def _register(self, kind: str, section: tuple[int, int, int]) -> Any:
        if self._agent is None:
            return None
        return self._agent.register_memory([(*section, "")], mem_type=kind)

    # The thread.

    def _run(self) -> None:
        pause_s = FIRST_PAUSE_S
        while True:
            with self._wake:
                while not (self._queue or self._flying or self._stopping):
                    self._wake.wait()
                if self._stopping and not (self._queue or self._flying):
                    break
            if self._post() | self._poll():
                pause_s = FIRST_PAUSE_S
            else:
                pause_s = min(2 * pause_s, LAST_PAUSE_S)
            if self._flying:
                time.sleep(pause_s)
        with self._agent_lock:
            self._registered.clear()
            self._agent = None

    def _post(self) -> bool:
        """Post slices of the oldest moves while there is room; True if something was."""
        moved = False
        while self._queue and self._flying_pieces + SLICE_PIECES <= FLYING_PIECES:
            move = self._queue[0]
            if not move.called_off:
                self._post_slice(move)
                moved = True
            if move.called_off or move.posted == move.pieces:
                with self._wake:
                    self._queue.popleft()
                self._finish_if_over(move)
        return moved

    def _post_slice(self, move: Move) -> None:
        first = move.posted
        count = min(SLICE_PIECES, move.pieces - first)
        part = slice(first, first + count)
        devices = np.full(count, self._mover.device, np.uint64)
        lengths = move.lengths[part]
        local = np.stack([move.addresses[part], lengths, devices], axis=1)
        remote = np.stack([move.offsets[part], lengths, move.fds[part]], axis=1)
        move.posted += count
        with self._agent_lock:
            agent = self._agent
            try:
                if agent is None:
                    raise RuntimeError(f"NIXL backend {self._mover.backend} is gone")
                handle = agent.initialize_xfer(
                    move.operation,
                    agent.get_xfer_descs(local, mem_type=self._mover.memory),
                    agent.get_xfer_descs(remote, mem_type="FILE"),
                    agent.name,
                )
            except Exception as error:  # memory or file not registered
                reason = OSError(errno.EINVAL, f"NIXL refused the transfer: {error!r}")
                move.errors.update(dict.fromkeys(range(first, first + count), reason))
                move.landed += count
                move.call_off()
                return
            self._flying.append(_Slice(move, first, count, handle))
            self._flying_pieces += count
            try:
                failed = agent.transfer(handle) == "ERR"
            except Exception:
                failed = True
        if failed:
            self._salvage()

    def _poll(self) -> bool:
        """See which slices landed; True if one did."""
        landed: list[_Slice] = []
        failed = False
        with self._agent_lock:
            for part in self._flying:
                try:
                    state = self._agent.check_xfer_state(part.handle)
                except Exception:
                    state = "ERR"
                if state == "DONE":
                    part.handle.release()
                    landed.append(part)
                failed |= state == "ERR"
        for part in landed:
            self._flying.remove(part)
            self._land(part)
        if failed:
            self._salvage()
        return bool(landed) or failed

    def _salvage(self) -> None:
        """Replace the agent after a failed I/O and do what it had in flight by system calls."""
        lost, self._flying = self._flying, []
        with self._agent_lock:
            for part in lost:
                # Releasing it would poll a queue whose requests are half gone; a few bytes leak.
                part.handle._released = True
                part.handle = None
            if not self._waits_at_end:
                _BROKEN_AGENTS.append(self._agent)
            self._agent = None
            try:
                self._make_agent()
            except Exception:
                logger.exception("NIXL backend %s cannot be made again", self._mover.backend)
        for part in lost:
            for i in range(part.first, part.first + part.count):
                try:
                    self._move_plainly(part.move, i)
                except OSError as error:
                    part.move.errors[i] = error
            self._land(part)

    def _move_plainly(self, move: Move, i: int) -> None:
        if self._mover.memory != "DRAM":
            raise OSError(errno.EIO, f"NIXL backend {self._mover.backend} failed")
        address, length = int(move.addresses[i]), int(move.lengths[i])
        memory = memoryview((ctypes.c_char * length).from_address(address)).cast("B")
        call = os.preadv if move.operation == "READ" else os.pwritev
        done = 0
        while done < length:
            moved = call(int(move.fds[i]), [memory[done:]], int(move.offsets[i]) + done)
            if moved == 0:
                raise _short(move.operation, i)
            done += moved

    def _land(self, part: _Slice) -> None:
        self._flying_pieces -= part.count
        part.move.landed += part.count
        self._finish_if_over(part.move)

    def _finish_if_over(self, move: Move) -> None:
        if not move.over or move.done():
            return
        if move.called_off and not move.errors:
            move.set_exception(CancelledError("the move was called off"))
            return
        for i in np.flatnonzero(_beyond_end(move)[: move.landed]):
            move.errors.setdefault(int(i), _short(move.operation, int(i)))
        if move.errors:
            move.set_exception(MoveError(move.operation, move.errors))
        else:
            move.set_result(None)


def _short(operation: str, piece: int) -> OSError:
    return OSError(errno.EIO, f"short {operation.lower()}: the file ends inside piece {piece}")


def _beyond_end(move: Move) -> np.ndarray:
    """Which pieces, bool (n,), end after the end of their file as it is now."""
    beyond = np.zeros(move.pieces, bool)
    for fd in np.unique(move.fds):
        try:
            status = os.fstat(int(fd))
            size = status.st_size if stat.S_ISREG(status.st_mode) else WHOLE_FILE_BYTES
        except OSError:
            size = 0
        mine = move.fds == fd
        beyond[mine] = move.offsets[mine] + move.lengths[mine] > size
    return beyond
