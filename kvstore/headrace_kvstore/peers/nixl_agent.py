"""One NIXL agent with UCX on one thread, which lets peers read a piece of memory and reads theirs.

NIXL's own progress thread never sleeps, so it is switched off. This thread polls while a transfer
is in flight or a peer may be reading (`serving`), and sleeps otherwise. Reads through shared
memory (UCX's CMA) finish within the call that posts them. They need the owner for the first
connection only. Over TCP the owner takes part in each read.

A read in flight cannot be cancelled. If it takes too long, its connection is cut; the read ends
when UCX gives it up, and its memory may be written to until then. When a peer dies, NIXL reports
an error at the next use of the connection and drops the peer.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np

logger = logging.getLogger("headrace.kvstore")

FIRST_PAUSE_S, LAST_PAUSE_S = 20e-6, 500e-6


class PullError(OSError):
    """Failure of a read from a peer; the text is one word for the metrics: lost, slow, refused."""


class Pull(Future[None]):
    """Pieces on their way from a peer; raises `PullError`."""

    def __init__(self, peer: str, columns: tuple[np.ndarray, ...], until_s: float) -> None:
        super().__init__()
        self.peer, self.columns, self.until_s = peer, columns, until_s
        self.aborted = False
        self.slow = False
        self.bytes = int(columns[2].sum())
        self.completed_s = 0.0
        self.set_running_or_notify_cancel()


@dataclass
class _PendingRead:
    pull: Pull
    handle: Any


class NixlAgent:
    """NIXL agent of one memory: `length` bytes at `address`, which must outlive the agent.

    Args:
        serving: whether a peer may be reading, so that this side must poll.

    Raises:
        ImportError, RuntimeError: no NIXL, or no UCX.
    """

    def __init__(
        self, address: int, length: int, serving: Callable[[], bool] = lambda: False
    ) -> None:
        from nixl._api import nixl_agent, nixl_agent_config

        self.name = f"headrace-{uuid.uuid4()}"
        self._serving = serving
        config = nixl_agent_config(enable_prog_thread=False, backends=[])
        self._agent = nixl_agent(self.name, config)
        try:
            self._agent.create_backend("UCX", {})
            self._memory = self._agent.register_memory([(address, length, 0, "")], mem_type="DRAM")
        except Exception as error:
            raise RuntimeError(f"NIXL backend UCX cannot be made: {error!r}") from error
        self.metadata: bytes = self._agent.get_agent_metadata()
        self._wake = threading.Condition()
        self._calls: deque[Callable[[], None]] = deque()
        self._pending: list[_PendingRead] = []
        self._known: set[str] = set()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="kv-remote", daemon=True)
        self._thread.start()

    def connect(self, metadata: bytes) -> Future[str]:
        """Connect to a peer by its metadata; the future gives the name to read it by."""
        connected: Future[str] = Future()

        def connect() -> None:
            try:
                name = self._agent.add_remote_agent(metadata)
                text = name.decode() if isinstance(name, bytes) else str(name)
                self._known.add(text)
                connected.set_result(text)
            except Exception as error:
                connected.set_exception(PullError(f"NIXL refuses the peer's metadata: {error!r}"))

        if not self._call(connect):
            connected.set_exception(PullError("off"))
        return connected

    def disconnect(self, peer: str) -> None:
        """Cut the connection."""
        self._call(lambda: self._disconnect(peer))

    def read(
        self, peer: str, local: np.ndarray, remote: np.ndarray, lengths: np.ndarray, limit_s: float
    ) -> Pull:
        """Start filling local memory; each column is one address or size a piece.

        limit_s: time from now until the peer counts as too slow.
        """
        columns = tuple(np.ascontiguousarray(c, np.uint64) for c in (local, remote, lengths))
        pull = Pull(peer, columns, time.monotonic() + limit_s)
        if not self._call(lambda: self._post(pull)):
            pull.set_exception(PullError("off"))
        return pull

    def wake(self) -> None:
        """Wake the thread, since `serving` may have become true."""
        with self._wake:
            self._wake.notify()

    def close(self, timeout_s: float) -> bool:
        """End the agent; return False if bytes may still arrive after that time."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._thread.join(max(0.0, timeout_s))
        return not self._thread.is_alive()

    def _call(self, call: Callable[[], None]) -> bool:
        """Have the thread make the call; return False if the thread has ended, or will."""
        with self._wake:
            if not self._stopping:
                self._calls.append(call)
                self._wake.notify()
            return not self._stopping

    # The thread

    def _run(self) -> None:
        pause_s = FIRST_PAUSE_S
        while True:
            with self._wake:
                while not (self._busy() or self._stopping):
                    self._wake.wait()
                if self._stopping and not (self._pending or self._calls):
                    break
                call = self._calls.popleft() if self._calls else None
            if call is not None:
                call()
            if self._poll() or call is not None:
                pause_s = FIRST_PAUSE_S
                continue
            self._progress()
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LAST_PAUSE_S)
        for peer in list(self._known):
            self._disconnect(peer)
        try:
            self._agent.deregister_memory(self._memory)
        except Exception:
            logger.exception("the arena cannot be taken back from NIXL")
        del self._agent

    def _busy(self) -> bool:
        return bool(self._calls or self._pending) or self._serving()

    def _progress(self) -> None:
        try:
            self._agent.get_new_notifs()
        except Exception:
            logger.exception("NIXL makes no progress")
            time.sleep(0.1)

    def _post(self, pull: Pull) -> None:
        if pull.aborted or self._stopping:
            pull.set_exception(PullError("off"))
            return
        if time.monotonic() > pull.until_s:
            pull.set_exception(PullError("slow"))
            return
        local, remote, lengths = pull.columns
        zeros = np.zeros(len(lengths), np.uint64)
        agent = self._agent
        try:
            handle = agent.initialize_xfer(
                "READ",
                agent.get_xfer_descs(np.stack([local, lengths, zeros], axis=1), mem_type="DRAM"),
                agent.get_xfer_descs(np.stack([remote, lengths, zeros], axis=1), mem_type="DRAM"),
                pull.peer,
            )
        except Exception:  # NIXL no longer knows the peer or its memory
            pull.set_exception(PullError("refused" if pull.peer in self._known else "lost"))
            return
        pending = _PendingRead(pull, handle)
        try:
            state = agent.transfer(handle)
        except Exception:
            state = "ERR"
        if state == "PROC":
            self._pending.append(pending)
        else:
            self._on_complete(pending, state)

    def _poll(self) -> bool:
        now_s, completed = time.monotonic(), False
        for pending in list(self._pending):
            try:
                state = self._agent.check_xfer_state(pending.handle)
            except Exception:
                state = "ERR"
            if state != "PROC":
                self._pending.remove(pending)
                self._on_complete(pending, state)
                completed = True
            elif now_s > pending.pull.until_s and not pending.pull.slow:
                pending.pull.slow = True
                self._disconnect(pending.pull.peer)
        return completed

    def _on_complete(self, pending: _PendingRead, state: str) -> None:
        pull = pending.pull
        pull.completed_s = time.monotonic()
        try:
            pending.handle.release()
        except Exception:
            pending.handle._released = True  # a few bytes leak
        if state == "DONE":
            pull.set_result(None)
        else:
            self._disconnect(pull.peer)
            pull.set_exception(PullError("slow" if pull.slow else "lost"))

    def _disconnect(self, peer: str) -> None:
        if peer in self._known:
            self._known.discard(peer)
            try:
                self._agent.remove_remote_agent(peer)
            except Exception as error:  # NIXL has dropped the peer already
                logger.debug("peer %s is gone: %r", peer, error)
