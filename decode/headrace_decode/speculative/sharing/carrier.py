"""Exchanges the contents of drafting memories between replicas, over the node's board.

The carrier is a thread beside the engine, and no look-up waits for it. It holds the memory's lock
for one segment at a time (`exchange`), and never while it communicates. A turn moves at most
TURN_BYTES, and turns are spaced so that at most `bytes_per_s` are moved. Partitions with data to
send take turns, so that loading a corpus does not delay the answers of other partitions. While no
node answers, the memories become less fresh: the thread tries again, and posts its unsent data when
a node is back.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections import Counter
from typing import Any

from headrace_decode.speculative.retrieval.draft_memory import Key
from headrace_decode.speculative.settings import CarrierSettings
from headrace_decode.speculative.sharing.exchange import Exchange
from headrace_decode.speculative.sharing.record import DamagedError
from headrace_kvstore.protocol.board import Note
from headrace_kvstore.protocol.client import NodeAway, NodeClient
from headrace_kvstore.protocol.wire import Notes, PostNote, ReadNotes

logger = logging.getLogger("headrace.speculation")

TURN_BYTES = 128 * 1024
NOTE_BYTES = 32 * 1024
IDLE_S = 30.0
IDLE_LOOKS = 3
"""Number of turns for one reading of the board, if no data was moved for `IDLE_S`."""


class Carrier:
    """A thread that exchanges data from `start` to `close` or the process's end. Never raises."""

    def __init__(self, exchange: Exchange, settings: CarrierSettings) -> None:
        self.exchange, self.settings = exchange, settings
        self._client = NodeClient(
            settings.store,
            timeout_s=settings.timeout_s,
            retry_s=0.0,
            socket_folder=settings.socket_folder,
        )
        self._writer = exchange.memory.replica.to_bytes(8, "little")
        self._generation = ""
        self._read_to = self._head = 0
        self._notes = 0
        self._unposted: tuple[Key, bytes] | None = None
        """A batch that the node has not confirmed."""
        self._moved_at_s = time.monotonic()
        self._looks = 0
        self._state = "not started"
        self._counts: Counter[str] = Counter()
        self._thread_s = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="draft-carrier", daemon=True)

    def start(self) -> None:
        """Start the thread, once. It begins with all notes on the board."""
        if self._state == "not started":
            self._state = "looking"
            self._thread.start()

    def close(self) -> None:
        """Stop the thread."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
        self._client.close()

    def stats(self) -> dict[str, Any]:
        """Return JSON-able statistics.

        These are the node's state; notes posted and absorbed, refused as damaged, and failed for
        another reason; records and bytes in them, and refused records of another model or tokenizer
        (`of_others`); numbers of entries not posted and of places on the board not read yet; the
        longest time for which the memory's lock was held; the thread's CPU seconds.
        """
        counted = ("posted", "posted_bytes", "absorbed", "absorbed_bytes", "records")
        return {
            "state": self._state,
            **{name: self._counts[name] for name in (*counted, "damaged", "failed", "lost_node")},
            "of_others": self.exchange.of_others,
            "untold": self.exchange.untold,
            "behind": self._head - self._read_to,
            "longest_hold_s": self.exchange.longest_hold_s,
            "thread_s": self._thread_s,
        }

    def _run(self) -> None:
        pause_s = 0.0
        while not self._stop.wait(pause_s):
            before = self._counts["posted_bytes"] + self._counts["absorbed_bytes"]
            try:
                self._turn()
            except NodeAway as error:
                self._away(error)
            except Exception:
                self._counts["failed"] += 1
                logger.exception("carrying what was learned failed; it goes on")
            moved = self._counts["posted_bytes"] + self._counts["absorbed_bytes"] - before
            more = moved and (self.exchange.untold or self._head > self._read_to)
            self._moved_at_s = time.monotonic() if moved else self._moved_at_s
            pause_s = moved / self.settings.bytes_per_s
            pause_s = pause_s if more else max(pause_s, self.settings.poll_s)
            self._thread_s = time.thread_time()

    def _away(self, error: NodeAway) -> None:
        if self._state == "up":
            self._counts["lost_node"] += 1
            logger.warning("what is learned is not shared while no store node answers: %s", error)
        self._state = "away"

    def _turn(self) -> None:
        self._looks += 1
        if time.monotonic() < self._moved_at_s + IDLE_S or self._looks % IDLE_LOOKS == 0:
            self._absorb()
        self._post()

    def _post(self) -> None:
        left = TURN_BYTES
        while left > 0:
            self._unposted = self._unposted or self.exchange.tell(NOTE_BYTES)
            if self._unposted is None:
                return
            key, data = self._unposted
            note = Note(self._writer, _stream(key), self._notes + 1, data)
            if self._ask(PostNote(self._generation, note)).generation != self._generation:
                return  # the node restarted since the last reading: the next turn starts over
            self._unposted = None
            self._notes += 1
            self._counts["posted"] += 1
            self._counts["posted_bytes"] += len(data)
            left -= len(data)

    def _absorb(self) -> None:
        place = self._generation, self._read_to
        reply = self._ask(ReadNotes(*place, TURN_BYTES, self._writer))
        if reply.generation != self._generation:  # another board: it knows nothing of this replica
            self._generation, self._unposted = reply.generation, None
            self.exchange.tell_again()
        for note in reply.notes:
            name = f"note of {note.writer.hex()} up to {note.last}"
            try:
                self._counts["records"] += self.exchange.absorb(note.data, name)
                self._counts["absorbed"] += 1
            except DamagedError as error:
                self._counts["damaged"] += 1
                logger.warning("%s", error)
            except Exception:
                self._counts["failed"] += 1
                logger.exception("%s could not be taken in; the next one is", name)
            self._counts["absorbed_bytes"] += len(note.data)
        self._read_to, self._head = reply.after, reply.head

    def _ask(self, request: PostNote | ReadNotes) -> Notes:
        reply = self._client.ask(request).result()
        if not isinstance(reply, Notes):
            raise NodeAway(f"a node answers {type(request).__name__} with {type(reply).__name__}")
        self._state = "up"
        return reply


def _stream(key: Key) -> bytes:
    """Return a name for a partition that does not reveal the tenant's name."""
    name = f"{len(key.scope)} {key.scope} {key.tenant}".encode()
    return hashlib.blake2b(name, digest_size=16).digest()
