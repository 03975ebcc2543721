"""A store node and replicas' drafting memories, each in a process of its own, asked over a pipe."""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.draft_memory.arms import Ours
from benchmarks.draft_memory.corpora import Exchange
from benchmarks.draft_memory.replay import Outcome, replay
from headrace_decode.speculative.replication.replication_log import ReplicationLog
from headrace_decode.speculative.replication.segment_replicator import SegmentReplicator
from headrace_decode.speculative.retrieval.draft_memory import MemorySettings
from headrace_decode.speculative.settings import ReplicationSettings
from headrace_kvstore.node.node import StoreNode
from headrace_kvstore.settings.node_settings import NodeSettings

STORE = "drafts"
FLOOR = MemorySettings().floor
_context = multiprocessing.get_context("spawn")


class Child:
    """A process that answers calls of an object's methods; it ends with its parent process.

    Args:
        make: makes the object in the child process.
    """

    def __init__(self, make: Callable[..., Any], *arguments: Any) -> None:
        self._pipe, theirs = _context.Pipe()
        self.process = _context.Process(target=_serve, args=(theirs, make, arguments), daemon=True)
        self.process.start()
        theirs.close()

    def call(self, name: str, *arguments: Any) -> Any:
        """Return a method's result. Raises RuntimeError with what the method raised."""
        self._pipe.send((name, arguments))
        done, result = self._pipe.recv()
        if not done:
            raise RuntimeError(result)
        return result

    def kill(self) -> None:
        """With -9."""
        if self.process.pid is not None and self.process.is_alive():
            os.kill(self.process.pid, signal.SIGKILL)
        self.process.join()
        self._pipe.close()


class Node:
    """A StoreNode with little more than a gossip log."""

    def __init__(self, folder: Path) -> None:
        small: dict[str, Any] = {
            "dram_bytes": 2**22,
            "block_bytes": 2**16,
            "layers": 4,
            "name": STORE,
        }
        paths: dict[str, Any] = {"folder": folder, "socket_folder": folder}
        self._node = StoreNode(NodeSettings(**small, **paths)).start()

    def gossip_stats(self) -> dict[str, Any]:
        """Return the node's `GossipLog.stats`."""
        return dict(self._node.operations.stats()["gossip"])


class Replica:
    """A memory that shares, and replays exchanges as an engine would give them."""

    def __init__(self, folder: Path) -> None:
        self._arm = _SelectiveKeeping(FLOOR, replica=0)
        self._replicator = SegmentReplicator(
            ReplicationLog(self._arm.memory), ReplicationSettings(STORE, str(folder))
        )
        self._replicator.start()

    def answer(self, exchanges: list[Exchange]) -> Outcome:
        """Give these answers; each is kept."""
        self._arm.keep = True
        return replay(self._arm, exchanges)

    def ask(self, exchanges: list[Exchange]) -> Outcome:
        """Give these answers, but keep none."""
        self._arm.keep = False
        return replay(self._arm, exchanges)

    def wait(self, answers: int, limit_s: float) -> bool:
        """Wait until this memory knows so many answers, of any replica; return False if it does not
        within `limit_s` seconds."""
        end_s = time.monotonic() + limit_s
        while self._arm.memory.stats()["segments"] < answers:
            if time.monotonic() > end_s:
                return False
            time.sleep(0.002)
        return True

    def stats(self) -> dict[str, Any]:
        """Return `SegmentReplicator.stats`."""
        return self._replicator.stats()


class _SelectiveKeeping(Ours):
    """The drafting memory, which keeps an answer only if `keep` is set."""

    keep = True

    def close(self) -> None:
        self.memory.close_request(self._handle, keep=self.keep)


def folder() -> tempfile.TemporaryDirectory[str]:
    """Where a node has its arena and its socket."""
    return tempfile.TemporaryDirectory(prefix="headrace-share-")


def _serve(pipe: Connection, make: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    subject = make(*arguments)
    with suppress(EOFError, OSError):
        while True:
            name, given = pipe.recv()
            try:
                pipe.send((True, getattr(subject, name)(*given)))
            except Exception as error:
                pipe.send((False, repr(error)))
    os._exit(0)  # a node's threads are not waited for
