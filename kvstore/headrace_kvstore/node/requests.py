"""Maps each client request to one of the node's operations, and decides when it is answered.

- At once, in the socket's thread: operations that take microseconds.
- In the slow thread: operations that read many blocks or wait for locks, and unknown requests.
- Twice: `Locate` is answered at once with what NVMe has. If more blocks are being pulled from a
  peer or from objects, a second answer follows when the pull is over.
"""

from __future__ import annotations

from concurrent.futures import Executor, Future

import msgspec

from headrace_kvstore.node.neighbours import Pulling
from headrace_kvstore.node.operations import Operations
from headrace_kvstore.protocol import wire
from headrace_kvstore.protocol.server import Staged


class Requests:
    """Answers with a node's operations; `slow` runs those that may take long."""

    def __init__(self, operations: Operations, slow: Executor) -> None:
        self._operations, self._slow = operations, slow

    def answer(self, request: wire.Request) -> wire.Reply | Future[wire.Reply] | Staged:
        """Does what a request says: a `protocol.server.Handle`."""
        node = self._operations
        match request:
            case wire.Ping():
                return wire.Done()
            case wire.Locate(key, digest, hashes, lease_s, compute_s):
                located = wire.pack_locations(node.locate(digest, hashes, lease_s, key))
                pulling = node.pull(digest, hashes[len(located.places) :], compute_s)
                return located if pulling is None else _staged(located, pulling)
            case wire.Survey(digest, hashes, compute_s):
                found = node.survey(digest, hashes, compute_s)
                return wire.Surveyed([*found], node.has_more_than_dram)
            case wire.Prefetch(digest, hashes, priority):
                return wire.Done(node.prefetch(digest, hashes, priority))
            case wire.PostNote(generation, note):
                board = node.board
                if generation == board.generation:
                    board.post(note)
                end = board.head
                return wire.Notes(board.generation, end, end)
            case wire.ReadNotes(generation, after, most_bytes, but):
                return wire.pack_page(
                    node.board.read(after, most_bytes, generation=generation, but=but)
                )
        return self._slow.submit(self._answer_slowly, request)

    def _answer_slowly(self, request: wire.Request) -> wire.Reply:
        node = self._operations
        match request:
            case wire.ReportBad(digest, hashes, tier):
                return wire.Done(node.report_bad(digest, hashes, tier))
            case wire.Pin(digest, hashes, pinned):
                return wire.Done(node.pin(digest, hashes, pinned))
            case wire.Clear(whose, tiers):
                return wire.Done(node.clear(whose, tiers) if tiers else node.clear(whose))
            case wire.GetStats():
                return wire.Stats(node.stats())
        return wire.Failed(f"nobody answers {type(request).__name__}")


def _staged(located: wire.Located, pulling: Pulling) -> Staged:
    later: Future[wire.Located] = Future()
    pulling.done.add_done_callback(lambda _: later.set_result(located))
    now = msgspec.structs.replace(located, pulling=pulling.blocks, wait_s=pulling.wait_s)
    return Staged(now, later)
