"""The relay of a stream to its client, from as many replicas as are needed.

When the replica is lost midway, another replica resumes the stream after the events that the client
has. The same replica does so if it lives, since it holds the KV. Resuming is tried `MAX_TRIES`
times without a new event in between. Then the stream ends with an error event, as does a stream
that cannot be resumed.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

from headrace.gateway import errors
from headrace.gateway.asgi import Send
from headrace.gateway.relay.call import Answer, Call
from headrace.gateway.relay.replica_monitor import MonitoredRequest
from headrace.gateway.relay.retry import RetryingFetcher
from headrace.gateway.replica_pool import ReplicaPool
from headrace.gateway.upstream import ReplicaLost
from headrace.replica_health import Probe
from headrace_decode.resume.journal import Diverged, Journal

MAX_TRIES = 2
COUNTED_BYTES = 16 * 1024
"""Step, in bytes, by which the budget for bodies counts a stream's lines."""
REPLICA_ERROR = "replica_error"
"""Code, in the gateway's history, of a stream that a healthy replica ended with an error."""
_MIDWAY = "mid-stream, and no other replica can continue the stream: "


class StreamRelay:
    """The relay of all streams of one event loop.

    Args:
        pool: the replicas.
        fetcher: gets answers from replicas.
        on_lost: see `relay.Relay`.
    """

    def __init__(
        self,
        pool: ReplicaPool,
        fetcher: RetryingFetcher,
        on_lost: Callable[[str], None],
    ) -> None:
        self._pool, self._fetcher, self._on_lost = pool, fetcher, on_lost

    async def copy(self, call: Call, answer: Answer, journal: Journal, send: Send) -> None:
        """Pass on the events of a stream to its end. The caller closes the first answer."""
        first, tries, had, tail = answer, 0, 0, b""
        try:
            while True:
                try:
                    tail = await self._copy_events(call, answer, journal, send)
                    break
                except (ReplicaLost, Diverged) as lost:
                    if call.dialect.is_over(call.last_events):
                        self._pool.on_failure(answer.lease.replica, lost)
                        break
                    tries = 1 if journal.progress > had else tries + 1
                    had = journal.progress
                    try:
                        answer = await self._resume(call, answer, journal, lost, tries)
                    except errors.ApiError as error:
                        self._on_lost("stream")
                        call.error = error.code or error.kind
                        tail = call.dialect.event(error, call.last_events)
                        break
        finally:
            if answer is not first:
                answer.close()
        call.sent_bytes += len(tail)
        await send({"type": "http.response.body", "body": tail})

    def journal(self, call: Call, answer: Answer) -> Journal:
        """Return the journal of a stream; its `why_not` says why the stream cannot be resumed."""
        journal = call.journal or Journal(call.dialect.events)
        if not answer.has_resume_lines:
            journal.stop("its replica sends no lines to resume it from")
        elif call.reservation is None or not call.reservation.keep(call.reservation.size):
            journal.stop("the gateway has no room to keep its request")
        if journal.why_not is not None:
            call.drop_body()
        return journal

    async def _copy_events(self, call: Call, answer: Answer, journal: Journal, send: Send) -> bytes:
        """Pass on the events of one answer, each as soon as it is whole.

        Returns:
            The bytes after the last whole event, or the error event of a healthy replica.

        Raises:
            ReplicaLost: the answer broke off.
            Diverged: the answer does not continue the stream that the client has.
        """
        with self._fetcher.monitor.monitor(answer.lease.replica) as monitored:
            forwarder = EventForwarder(call, journal, send, monitored)

            async def pour() -> bool:
                try:
                    async with monitored.interruptible():
                        return await answer.reply.pour(forwarder.forward)
                except ReplicaLost:
                    await forwarder.send_pending()  # events that arrived just before the loss
                    raise

            over = forwarder.forward(answer.body) and await pour()
            while not over:
                # Outside `interruptible`, since it waits for the client.
                await forwarder.send_pending()
                if forwarder.error:
                    probe = await self._fetcher.probe(answer.lease.replica)
                    if probe is Probe.PASSED:
                        call.error = REPLICA_ERROR
                        return forwarder.error
                    hangs = probe is Probe.MISSED
                    why = f"an error, then its probe {probe.value}"
                    raise ReplicaLost(why, sent=True, dying=not hangs, hangs=hangs)
                over = await pour()
        return journal.rest()

    async def _resume(
        self,
        call: Call,
        answer: Answer,
        journal: Journal,
        lost: ReplicaLost | Diverged,
        tries: int,
    ) -> Answer:
        """Return a second answer to a stream that broke off.

        The answer may begin with events that the client has; the journal drops these.

        Raises:
            ApiError: the stream cannot be resumed.
        """
        replica = answer.lease.replica
        answer.close()
        dying = isinstance(lost, ReplicaLost) and lost.dying
        hangs = isinstance(lost, ReplicaLost) and lost.hangs
        lives = not dying and not hangs and await self._fetcher.probe(replica) is Probe.PASSED
        if not lives:
            self._pool.on_failure(replica, lost)
        if journal.why_not is not None:
            raise errors.replica_lost(_MIDWAY + journal.why_not)
        if isinstance(lost, Diverged) or tries > MAX_TRIES:
            if dying:
                self._fetcher.quarantine.add(call.tenant, call.target, call.repeated_body)
            raise errors.replica_lost(f"{_MIDWAY}{lost}, {tries} times in a row")
        call.resume_lines = journal.begin_resume()
        again = await self._fetcher.fetch(call, replica.replica_id if lives else "")
        if again.reply.status != 200 or not again.has_resume_lines:
            again.close()
            raise errors.replica_lost(f"{_MIDWAY}another replica answered {again.reply.status}")
        self._on_lost("resumed")
        call.resumed += 1
        return again


class EventForwarder:
    """The events of one answer on their way to the client.

    Most events pass from one connection to the other within the event loop's callback, without a
    switch of tasks. The task acts only if the client is slow or the replica reports an error.

    The journal counts an event as passed on when it arrives from the replica. Each one must
    therefore be sent even if the replica is lost: only the end of the client's request ends
    `send_pending`.

    Args:
        monitored: records that the replica lives.

    Attributes:
        error: the replica's last event if it reports an error; the client does not have it.
    """

    def __init__(
        self, call: Call, journal: Journal, send: Send, monitored: MonitoredRequest
    ) -> None:
        self._call, self._journal, self._send = call, journal, send
        self._on_bytes = monitored.on_bytes
        self._counted_bytes = journal.line_bytes // COUNTED_BYTES * COUNTED_BYTES
        self._pending = b""
        self.error = b""

    def forward(self, chunk: bytes) -> bool:
        """Pass on the events of a chunk.

        Returns:
            Whether they were written to the client; if not, `send_pending` must send them.
        """
        self._on_bytes()
        call, journal = self._call, self._journal
        events, self.error = journal.pass_on(chunk)
        must_wait = bool(self.error)
        if (recorder := call.recorder) is not None and events:
            events = recorder.rewrite(events)
            must_wait = must_wait or recorder.holds_last
        call.tokens = journal.tokens
        if journal.line_bytes - self._counted_bytes >= COUNTED_BYTES:
            self._count_lines()
        if not events and not must_wait:
            return True
        if must_wait or not call.write_nowait(events):
            self._pending = events
            return False
        self._sent(events)
        return True

    async def send_pending(self) -> None:
        """Send the events that `forward` did not write; the last one after its answer is kept."""
        events = self._pending
        if (recorder := self._call.recorder) is not None:
            events += await recorder.finish()
        if events:
            await self._send({"type": "http.response.body", "body": events, "more_body": True})
            self._pending = b""
            self._sent(events)

    def _sent(self, events: bytes) -> None:
        call = self._call
        if call.ttft_s is None:
            call.ttft_s = perf_counter() - call.started
            call.on_first()
        call.sent_bytes += len(events)
        call.last_events = events

    def _count_lines(self) -> None:
        reservation = self._call.reservation
        more_bytes = self._journal.line_bytes - self._counted_bytes
        if reservation is None or not reservation.keep(more_bytes):
            self._journal.stop("the gateway has no room to keep its lines")
        self._counted_bytes = self._journal.line_bytes
