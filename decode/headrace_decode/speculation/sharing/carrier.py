"""Carries what a memory learned to the other replicas and theirs to it, over the node's board.

A thread beside the engine. No look-up waits for it and it asks nobody while drafts are made; it
holds the memory's lock for one segment at a time (`exchange`), and never while it talks. Turns move
TURN_BYTES at most and are spaced so that no more than `bytes_per_s` move; partitions with something
to send take turns, so that loading a corpus does not hold up anybody's answers. A node that is away
costs freshness: the thread tries again, and posts what it still has once a node is there.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections import Counter
from typing import Any

from headrace_decode.speculation.retrieval.draft_memory import Key
from headrace_decode.speculation.settings import CarrierSettings
from headrace_decode.speculation.sharing.exchange import Exchange
from headrace_decode.speculation.sharing.record import DamagedError
from headrace_kvstore.protocol.board import Note
from headrace_kvstore.protocol.client import NodeAway, NodeClient
from headrace_kvstore.protocol.wire import Notes, PostNote, ReadNotes

logger = logging.getLogger("headrace.speculation")

TURN_BYTES = 128 * 1024
NOTE_BYTES = 32 * 1024
IDLE_S = 30.0
IDLE_LOOKS = 3
"""Where nothing has moved for so long, the board is read at each third look only."""


class Carrier:
    """Carries from `start` to `close`, or as long as the process lives. Never raises."""

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
        """Begin; at once with all that is on the board. Once."""
        if self._state == "not started":
            self._state = "looking"
            self._thread.start()

    def close(self) -> None:
        """Carry no more."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
        self._client.close()

    def stats(self) -> dict[str, Any]:
        """JSON-able: the node's state; notes posted and absorbed, refused as damaged, failed for
        another reason; records and bytes in them, and records of another model or tokenizer, which
        are passed over (`of_others`); segments not posted yet (`untold`) and places on
        the board not read yet (`behind`); the thread's CPU seconds."""
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
                return  # restarted since it was read from: the next turn begins anew
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
    """A name for a partition that does not reveal the tenant's."""
    name = f"{len(key.scope)} {key.scope} {key.tenant}".encode()
    return hashlib.blake2b(name, digest_size=16).digest()
