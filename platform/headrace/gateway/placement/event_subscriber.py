"""The subscriber to the reports and KV events of all replicas.

A replica's publisher (`headrace_engine.reporting.replica_publisher`) has two sockets. One publishes
batches of block events and reports; the other replays batches. A subscriber proves with the
replica's token that it belongs to the app. It handles three kinds of messages:

- Batches go to the `KvEventProcessor`, which detects missing ones. They are requested on the replay
  socket.
- Reports go to `on_report`, one at a time. Of the reports that wait together, only the last counts.
- An empty report is a heartbeat: the replica is alive and has nothing new.

A source is named by its replica's id and has one holder, the engine's own KV cache. A source that
is silent for longer than the processor allows loses its holder; it gets a new one when it sends
again. The gateway reconnects to a silent source before that, because ZeroMQ does not reconnect
after all errors.

All work is done on the event loop, in pieces: after `SLICE_S` the rest waits for the loop's next
turn. Sources take turns. If a source sends faster than the gateway reads, messages beyond
`MAX_QUEUED_MESSAGES` are dropped, and replayed later. Messages that cannot be read are counted, and
logged once a source.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import zmq

from headrace.gateway.placement.endpoint_info import EndpointInfo
from headrace.router.blocks.kv_events import KvEventError, KvEventProcessor, ReplayRequest
from headrace_engine.reporting import report as reports
from headrace_engine.reporting.report import Report
from headrace_kvstore.protocol.events import BLOCKS_TOPIC, END_SEQ, REPORT_TOPIC
from headrace_kvstore.protocol.membership import Membership

logger = logging.getLogger("headrace.gateway")

SLICE_S = 0.004
"""Longest work in one turn of the loop; a message that is being read at its end is finished."""
SLICE_MESSAGES = 8
"""Maximum number of messages of one source before the next source's turn."""
CHECK_INTERVAL_S = 0.2
MAX_QUEUED_MESSAGES = 1000
"""Maximum number of messages of one source that wait for the loop."""
MAX_MESSAGE_BYTES = 256 * 1024
MAX_ENDPOINTS = 4096
MAX_REPLAYS = 64
"""Maximum number of replays under way at a time; the others are requested later."""
REPLAY_S = 5.0
"""Time without a message after which a replay is given up."""
LARGE_REPLAY = 100
"""Number of replayed batches from which on the next replay is requested at once, since the answer
was one part of many."""
SILENT_S = 2.0
"""Time without a message, or ten heartbeats, after which the gateway connects again."""
HEARTBEAT_MS, HEARTBEAT_TIMEOUT_MS = 5_000, 15_000
"""ZeroMQ's heartbeats, by which it notices that a machine vanished, and connects again."""
RECONNECT_MS, RECONNECT_MAX_MS = 100, 2_000
_NUMBER_BYTES = 8


class _Socket:
    """A socket that is read a few messages at a time."""

    def __init__(self, source: _Subscription, socket: zmq.Socket[bytes]) -> None:
        self.source, self.socket = source, socket
        self.fd = int(socket.getsockopt(zmq.FD))


class _Subscription:
    """The subscription to one replica."""

    def __init__(self, name: str, info: EndpointInfo) -> None:
        self.name, self.info = name, info
        self.membership = Membership(info.token)
        self.events: _Socket | None = None
        self.replay: _Socket | None = None
        self.replay_until_s = 0.0
        self.replayed = 0
        """Number of batches of the present replay."""
        self.joined = False
        self.last_message_s = 0.0
        """Time of its last message, or of the connection."""
        self.last_report = -1
        self.has_warned = False


class EventSubscriber:
    """The subscriptions of one gateway. Use it from one event loop only.

    Args:
        processor: gets the batches; its other sources must not be named like replicas.
        on_report: gets each report, on the loop. It should take well below a millisecond.
        clock: the processor's clock, in seconds.
    """

    def __init__(
        self,
        processor: KvEventProcessor,
        on_report: Callable[[Report], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._processor, self._on_report, self._clock = processor, on_report, clock
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.subscriptions: dict[str, _Subscription] = {}
        self._replaying: dict[_Subscription, None] = {}
        self._due: dict[_Socket, None] = {}
        """Streams that may have a message, in the order of their turns."""
        self._woken = False
        self.counts: Counter[str] = Counter()
        self.longest_turn_s = 0.0

    # The subscriptions

    def follow(self, sources: Mapping[str, EndpointInfo]) -> None:
        """Subscribe to these replicas and no others; call it in the event loop, as often as you
        like.

        Args:
            sources: addresses by replica id. If one changed, its subscription starts again.
        """
        self._start()
        for name in [name for name in self.subscriptions if name not in sources]:
            self._drop(self.subscriptions.pop(name))
            self._processor.remove_source(name)
        for name, info in sources.items():
            known = self.subscriptions.get(name)
            if known is not None and known.info == info:
                continue
            if known is not None:
                self._drop(self.subscriptions.pop(name))
            if len(self.subscriptions) >= MAX_ENDPOINTS:
                if not self.counts["refused"]:
                    logger.warning(
                        "more than %d replicas: the others are not followed", MAX_ENDPOINTS
                    )
                self.counts["refused"] += 1
                continue
            source = _Subscription(name, info)
            self.subscriptions[name] = source
            self._join(source)
            self._connect(source)

    def stats(self) -> dict[str, Any]:
        """Return the counts in JSON types."""
        return {
            "subscriptions": len(self.subscriptions),
            "replaying": len(self._replaying),
            "longest_turn_s": round(self.longest_turn_s, 6),
            **self.counts,
        }

    def close(self) -> None:
        """End all subscriptions, and remove their sources from the processor."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for source in self.subscriptions.values():
            self._drop(source)
            self._processor.remove_source(source.name)
        self.subscriptions.clear()
        if self._context is not None:
            self._context.destroy(0)
            self._context = None

    # Connections

    def _start(self) -> None:
        if self._context is None:
            self._loop = asyncio.get_running_loop()
            self._context = zmq.Context()
            limit = int(self._context.get(zmq.SOCKET_LIMIT))
            self._context.set(zmq.MAX_SOCKETS, min(limit, MAX_ENDPOINTS + MAX_REPLAYS + 64))
            self._timer = self._loop.call_later(CHECK_INTERVAL_S, self._check)

    def _open(self, source: _Subscription, kind: int, endpoint: str) -> _Socket | None:
        """Connect a socket to the source; return None if that fails."""
        assert self._context is not None and self._loop is not None
        socket = None
        try:
            socket = self._context.socket(kind)
            source.membership.enter(socket)
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.IPV6, 1)
            socket.setsockopt(zmq.RCVHWM, MAX_QUEUED_MESSAGES)
            socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
            socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
            socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
            socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
            socket.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MAX_MS)
            if kind == zmq.SUB:
                socket.setsockopt(zmq.SUBSCRIBE, b"")
            socket.connect(endpoint)
            stream = _Socket(source, socket)
            self._loop.add_reader(stream.fd, self._wake, stream)
        except (zmq.ZMQError, OSError) as error:
            if socket is not None:
                socket.close(0)
            self._count_error(source, "unconnected", f"cannot connect to {endpoint}: {error}")
            return None
        return stream

    def _close(self, stream: _Socket | None) -> None:
        if stream is not None:
            assert self._loop is not None
            self._loop.remove_reader(stream.fd)
            self._due.pop(stream, None)
            stream.socket.close(0)

    def _connect(self, source: _Subscription) -> None:
        self._close(source.events)
        source.last_message_s = self._clock()
        source.events = self._open(source, zmq.SUB, source.info.events)
        if source.events is not None:
            self._wake(source.events)

    def _drop(self, source: _Subscription) -> None:
        self._end_replay(source)
        self._close(source.events)
        source.events = None

    def _join(self, source: _Subscription) -> None:
        try:
            info = source.info
            self._processor.add_source(source.name, info.epoch, self._clock(), info.windows)
            source.joined = True
        except OverflowError as error:
            self._count_error(source, "refused", str(error))

    # Time

    def _check(self) -> None:
        assert self._loop is not None
        self._timer = self._loop.call_later(CHECK_INTERVAL_S, self._check)
        now_s = self._clock()
        for source in list(self._replaying):
            if now_s > source.replay_until_s:
                self.counts["replays_given_up"] += 1
                self._end_replay(source)
        for source in self.subscriptions.values():
            if source.events is None or now_s - source.last_message_s > SILENT_S:
                self.counts["connected_anew"] += 1
                self._connect(source)
            else:  # one event of the socket's descriptor may announce several messages
                self._wake(source.events)
        self._request_replays(now_s)

    def _request_replays(self, now_s: float) -> None:
        requests, expired = self._processor.poll(now_s)
        for name in expired:
            if name in self.subscriptions:
                self.subscriptions[name].joined = False
        for ask in requests:
            source = self.subscriptions.get(ask.source)
            if source is None or source.info.epoch != ask.epoch:
                continue
            self._end_replay(source)
            if len(self._replaying) < MAX_REPLAYS:
                self._begin_replay(source, ask, now_s)
            else:
                self.counts["replays_put_off"] += 1

    def _begin_replay(self, source: _Subscription, ask: ReplayRequest, now_s: float) -> None:
        source.replay = self._open(source, zmq.DEALER, source.info.replay)
        if source.replay is not None:
            self.counts["replays"] += 1
            self._replaying[source] = None
            source.replayed, source.replay_until_s = 0, now_s + REPLAY_S
            wanted = ask.seq.to_bytes(_NUMBER_BYTES, "big")
            try:
                source.replay.socket.send_multipart((b"", wanted), zmq.NOBLOCK)
            except zmq.ZMQError:  # the connection was refused already; the processor asks again
                self.counts["replays_given_up"] += 1
                self._end_replay(source)

    def _end_replay(self, source: _Subscription) -> None:
        self._close(source.replay)
        source.replay = None
        self._replaying.pop(source, None)

    # Messages

    def _wake(self, stream: _Socket) -> None:
        """Schedule the reading of a stream that may have a message."""
        self._due.setdefault(stream)
        if not self._woken:
            assert self._loop is not None
            self._woken = True
            self._loop.call_soon(self._read_due)

    def _read_due(self) -> None:
        """Read from one source after another, for `SLICE_S`."""
        self._woken = False
        began_s = time.perf_counter()
        until_s = began_s + SLICE_S
        while self._due:
            stream = next(iter(self._due))
            del self._due[stream]
            if self._read(stream, until_s):
                self._due[stream] = None
            if time.perf_counter() >= until_s:
                break
        self.longest_turn_s = max(self.longest_turn_s, time.perf_counter() - began_s)
        if self._due:
            self._wake(next(iter(self._due)))

    def _read(self, stream: _Socket, until_s: float) -> bool:
        """Take a few messages of a stream. Return whether there may be more."""
        source, last_report, more = stream.source, b"", True
        for _ in range(SLICE_MESSAGES):
            try:
                frames = stream.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                more = False
                break
            except zmq.ZMQError as error:
                self._count_error(source, "unread", str(error))
                more = False
                break
            if stream is source.replay:
                if not self._take_replayed(source, frames):
                    return False
            else:
                last_report = self._take_message(source, frames) or last_report
            if time.perf_counter() >= until_s:
                break
        if last_report:
            self._take_report(source, last_report)
        return more and not stream.socket.closed

    def _take_message(self, source: _Subscription, frames: list[bytes]) -> bytes:
        """Take a published message. Return a report's bytes if it is newer than the last one."""
        source.last_message_s = self._clock()
        topic, *numbers, payload = frames if len(frames) > 1 else (b"", b"")
        expected = {BLOCKS_TOPIC: 1, REPORT_TOPIC: 2}.get(topic)
        if expected is None:
            self.counts["unknown_topics"] += 1  # topic of a later version
            return b""
        if len(numbers) != expected or any(len(each) != _NUMBER_BYTES for each in numbers):
            self._count_error(source, "malformed", f"a message of {len(frames)} frames")
            return b""
        seq, *next_seq = (int.from_bytes(number, "big", signed=True) for number in numbers)
        if topic == BLOCKS_TOPIC:
            self._apply_batch(source, seq, payload)
        else:
            self._alive(source, *next_seq)
            if seq > source.last_report:
                source.last_report = seq
                return payload
        return b""

    def _alive(self, source: _Subscription, next_seq: int) -> None:
        if not source.joined:
            self._join(source)
        self._processor.on_heartbeat(source.name, self._clock(), next_seq)

    def _take_report(self, source: _Subscription, payload: bytes) -> None:
        try:
            report = reports.decode(payload)
            if report.replica != source.name:
                raise ValueError(f"it is of {report.replica!r} - at `$.replica`")
        except ValueError as error:
            self._count_error(source, "bad_reports", f"a report that cannot be: {error}")
            return
        self.counts["reports"] += 1
        try:
            self._on_report(report)
        except Exception:
            self.counts["failed_reports"] += 1
            if not source.has_warned:
                source.has_warned = True
                logger.exception(
                    "a report of %s could not be used; this is logged once", source.name
                )

    def _take_replayed(self, source: _Subscription, frames: list[bytes]) -> bool:
        """Take a message of a replay. Return whether more messages may follow."""
        now_s = self._clock()
        good = len(frames) == 4 and len(frames[2]) == _NUMBER_BYTES
        if good and frames[2] != END_SEQ:
            source.replay_until_s = now_s + REPLAY_S
            source.replayed += 1
            seq = int.from_bytes(frames[2], "big", signed=True)
            self._apply_batch(source, seq, frames[3], replay=True)
            return source.replay is not None
        self._end_replay(source)
        if not good:
            self._count_error(source, "malformed", f"a replayed message of {len(frames)} frames")
            return False
        self._processor.on_replay_end(source.name, source.info.epoch, now_s)
        if source.replayed >= LARGE_REPLAY:
            self._request_replays(now_s)
        return False

    def _apply_batch(
        self, source: _Subscription, seq: int, payload: bytes, *, replay: bool = False
    ) -> None:
        if not source.joined:
            self._join(source)
            if not source.joined:
                return
        try:
            self._processor.on_batch(
                source.name, source.info.epoch, seq, payload, self._clock(), replay=replay
            )
        except (KvEventError, KeyError) as error:
            self._count_error(source, "bad_batches", str(error))

    def _count_error(self, source: _Subscription, kind: str, why: str) -> None:
        """Count a source's error, and log the source's first one."""
        self.counts[kind] += 1
        if not source.has_warned:
            source.has_warned = True
            logger.warning("the events of %s: %s; this is logged once", source.name, why)
