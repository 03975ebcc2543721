"""Reads of files through a NIXL backend: GDS_MT into GPU memory, POSIX into host memory.

A batch is as in `file_io`: piece i is `lengths[i]` bytes at memory address `addresses[i]` and at
`offsets[i]` of file `fds[i]`. A batch has no thread: the caller that waits for it, or asks whether
it is done, polls. One lock covers the agent, which is not thread-safe.

NIXL has these limits:

- It may report a short or failed read as done. So only checksums prove that bytes are right.
- It cannot cancel reads in flight. `abort` changes the outcome, and `done` stays False until all
  reads have landed.
- After an error, it is unknown which of a batch's reads still land. So the batch is never done, its
  memory is never freed, and `broken` marks this reader as unusable.
"""

from __future__ import annotations

import errno
import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import CancelledError
from typing import Any, Literal

import numpy as np

from headrace_kvstore.nvme.file_io import IoBatchError

FIRST_PAUSE_S, LAST_PAUSE_S = 20e-6, 400e-6
"""Sleep between polls, doubled from the first to the last."""
OPTIONS: defaultdict[str, dict[str, str]] = defaultdict(
    dict,
    # A batch has a piece for each block, and eight layers are on their way at once.
    POSIX={"use_aio": "true", "kernel_queue_size": "128", "ios_pool_size": "65536"},
)
WHOLE_FILE_BYTES = 1 << 62


class NixlIoBatch:
    """A scatter list on its way. `result`, `done`, `abort` and callbacks are as in
    `file_io.IoBatch`; callbacks run in the thread that sees the end."""

    def __init__(self, file_io: NixlFileIo, handle: Any, pieces: int) -> None:
        self._file_io, self._handle, self._pieces = file_io, handle, pieces
        self._error: BaseException | None = None
        self._landed = handle is None
        self._callbacks: list[Callable[[Any], None]] = []

    def abort(self) -> None:
        """Abort the batch; its memory is free once it is done."""
        if not self._landed and self._error is None:
            self._error = CancelledError("the batch was aborted")

    def done(self) -> bool:
        """Whether no more bytes will arrive."""
        if not self._landed and self._file_io.landed(self._handle, self):
            self._landed, self._handle = True, None
            callbacks, self._callbacks = self._callbacks, []
            for each in callbacks:
                each(self)
        return self._landed

    def failed(self) -> None:
        """Record that NIXL has reported a failure."""
        reason = OSError(errno.EIO, "NIXL: the transfer failed")
        self._error = IoBatchError("READ", dict.fromkeys(range(self._pieces), reason))

    def result(self, timeout: float | None = None) -> None:
        """Wait for the end.

        Raises:
            IoBatchError: it failed.
            CancelledError: it was aborted.
            TimeoutError: bytes may still arrive.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        pause_s = FIRST_PAUSE_S
        while not self.done() and not isinstance(self._error, IoBatchError):
            if deadline is not None and time.monotonic() >= deadline:
                raise TimeoutError
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LAST_PAUSE_S)
        if self._error is not None:
            raise self._error

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Return the error that `result` would raise."""
        return self._error

    def add_done_callback(self, call: Callable[[Any], None]) -> None:
        """Have `call` called with this batch when it is done."""
        if self._landed:
            call(self)
        else:
            self._callbacks.append(call)


class NixlFileIo:
    """Reads from files into registered memory. Thread-safe.

    Args:
        backend: "GDS_MT", or "POSIX" for host memory.
        memory: where addresses are.
        device: number of the GPU whose memory it is, which is the calling thread's current one.

    Raises:
        ImportError: NIXL is not installed.
        RuntimeError: the backend cannot be made here.
    """

    def __init__(self, backend: str, memory: Literal["DRAM", "VRAM"], device: int = 0) -> None:
        from nixl._api import nixl_agent, nixl_agent_config

        self._lock = threading.Lock()
        self._kind, self._device = memory, device
        config = nixl_agent_config(enable_prog_thread=False, backends=[])
        self._agent: Any = nixl_agent(f"headrace-{uuid.uuid4()}", config)
        try:
            self._agent.create_backend(backend, dict(OPTIONS[backend]))
        except Exception as error:
            raise RuntimeError(f"NIXL's plugin {backend} cannot be used here ({error})") from error
        self._files: dict[int, Any] = {}
        self._memory: list[Any] = []
        self._batches: set[NixlIoBatch] = set()
        self.broken = False

    def register(self, address: int, size_bytes: int) -> None:
        """Let reads land in this memory, until `close`."""
        section = [(address, size_bytes, self._device, "")]
        with self._lock:
            self._memory.append(self._agent.register_memory(section, mem_type=self._kind))

    def read(self, addresses: Any, fds: Any, offsets: Any, lengths: Any) -> NixlIoBatch:
        """Start filling memory from files; each argument is one number a piece.

        Raises:
            RuntimeError: an earlier read failed.
            Exception: NIXL's own: it does not accept the memory or a file.
        """
        if self.broken:
            raise RuntimeError("NIXL's reads are broken: an earlier one failed")
        addresses, fds, offsets, lengths = (
            np.ascontiguousarray(column, np.uint64).reshape(-1)
            for column in (addresses, fds, offsets, lengths)
        )
        if not len(lengths):
            return NixlIoBatch(self, None, 0)
        devices = np.full(len(lengths), self._device, np.uint64)
        with self._lock:
            agent = self._agent
            for fd in np.unique(fds).tolist():
                if fd not in self._files:
                    section = [(0, WHOLE_FILE_BYTES, fd, "")]
                    self._files[fd] = agent.register_memory(section, mem_type="FILE")
            handle = agent.initialize_xfer(
                "READ",
                agent.get_xfer_descs(
                    np.stack([addresses, lengths, devices], axis=1), mem_type=self._kind
                ),
                agent.get_xfer_descs(np.stack([offsets, lengths, fds], axis=1), mem_type="FILE"),
                agent.name,
            )
            batch = NixlIoBatch(self, handle, len(lengths))
            self._batches.add(batch)
            if agent.transfer(handle) == "ERR":
                self.broken = True
                batch.failed()
        return batch

    def deregister(self, fd: int) -> None:
        """Deregister a file that is about to be closed; no batch may read it."""
        with self._lock:
            known = self._files.pop(fd, None)
            if known is not None and self._agent is not None:
                self._agent.deregister_memory(known)

    def landed(self, handle: Any, batch: NixlIoBatch) -> bool:
        """Poll a batch; return whether all its bytes have landed."""
        with self._lock:
            if self.broken or self._agent is None:
                return False
            state = self._agent.check_xfer_state(handle)
            if state == "DONE":
                handle.release()
                self._batches.discard(batch)
                return True
            if state == "ERR":
                self.broken = True
                for each in self._batches:
                    each.failed()
            return False

    def close(self, timeout_s: float = 30.0) -> bool:
        """Wait for batches in flight, then end. Returns False if a batch stays in flight: the
        memory and this reader must then be kept for ever."""
        deadline = time.monotonic() + timeout_s
        while not self.broken and any(not batch.done() for batch in tuple(self._batches)):
            if time.monotonic() >= deadline:
                return False
            time.sleep(LAST_PAUSE_S)
        if self.broken:
            return False
        with self._lock:
            for known in (*self._files.values(), *self._memory):
                self._agent.deregister_memory(known)
            self._files.clear()
            self._memory.clear()
            self._agent = None
        return True
