"""The relay of a replica's answer to the client.

`retry` gets the answer, from another replica if one is lost before its answer began. An answer that
is not yet whole is passed on as it arrives, at the client's pace. A stream is passed on in whole
events (`stream_relay`). When its replica is lost midway, another one resumes it after them: the
same one if it lives, and at most `stream_relay.MAX_TRIES` times without a new event. A stream that
cannot be resumed ends with an error event.

A replica that has been silent for a while is probed (`replica_monitor`). If it is down, other
replicas take over its requests gradually. The health of a replica is judged in one place
(`headrace.replica_health`), and each loss is evidence for it.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

from headrace.gateway import errors
from headrace.gateway.asgi import Send
from headrace.gateway.relay.answer_tokens import answer_tokens
from headrace.gateway.relay.call import Answer, Call
from headrace.gateway.relay.headers import answer_headers
from headrace.gateway.relay.retry import RetryingFetcher
from headrace.gateway.relay.stream_relay import StreamRelay
from headrace.gateway.replica_pool import ReplicaPool
from headrace.gateway.upstream import ReplicaLost, Reply
from headrace_decode import techniques
from headrace_decode.resume.emitted import RESUME


class Relay:
    """The relay of one event loop.

    Args:
        pool: the replicas.
        fetcher: gets answers from them.
        on_lost: called when a replica was lost; see `GatewayMetrics.replica_lost`.
        on_techniques: called for each answer; see `GatewayMetrics.techniques`.
    """

    def __init__(
        self,
        pool: ReplicaPool,
        fetcher: RetryingFetcher,
        on_lost: Callable[[str], None],
        on_techniques: Callable[[str], None],
    ) -> None:
        self._pool, self._fetcher, self._on_techniques = pool, fetcher, on_techniques
        self._streams = StreamRelay(pool, fetcher, on_lost)

    async def aclose(self) -> None:
        """Stop monitoring replicas."""
        await self._fetcher.monitor.aclose()

    async def run(self, call: Call, send: Send) -> None:
        """Get an answer and copy it to the client.

        Raises:
            ApiError: there is no answer, the client's stream cannot be resumed, or the rest of an
                answer that is no stream did not arrive.
        """
        answer = await self._fetcher.fetch(call)
        if not answer.streamed:
            call.drop_body()
        try:
            status = answer.reply.status
            call.streamed = answer.streamed
            call.replica_id = answer.lease.replica.replica_id
            headers = answer_headers(answer.reply.headers)
            headers.append((b"x-request-id", call.request_id))
            headers.append((b"x-headrace-replica", call.replica_id.encode()))
            if call.techniques is not None and status == 200:
                offer = answer.lease.replica.techniques
                applied = techniques.applied_techniques(call.techniques, offer)
                headers.append((techniques.HEADER, applied.encode()))
                self._on_techniques(applied)
            start = {"type": "http.response.start", "status": status, "headers": headers}
            if answer.streamed:
                journal = self._streams.journal(call, answer)
                if call.journal is not None:
                    if journal.why_not is None:
                        headers.append((RESUME, b"1"))
                    elif journal.progress:
                        raise errors.cannot_resume(journal.why_not)
                await send(start)
                call.status = status
                await self._streams.copy(call, answer, journal, send)
            else:
                if call.recorder is not None and status == 200 and answer.is_whole:
                    answer.body = await call.recorder.whole(answer.body)
                size = b"%d" % len(answer.body) if answer.is_whole else _length(answer.reply)
                if size is not None:
                    headers.append((b"content-length", size))
                await send(start)
                call.status = status
                if status == 200 and answer.is_whole:
                    call.tokens = answer_tokens(answer.body)
                await self._send_body(call, answer, send)
        finally:
            answer.close()

    async def _send_body(self, call: Call, answer: Answer, send: Send) -> None:
        """Send an answer that is no stream; read its missing part at the client's pace.

        Raises:
            ApiError: the rest did not arrive.
        """
        body, more = answer.body, not answer.is_whole
        await send({"type": "http.response.body", "body": body, "more_body": more})
        call.ttft_s = perf_counter() - call.started
        call.sent_bytes = len(body)
        answer.body = b""
        with self._fetcher.monitor.monitor(answer.lease.replica) as monitored:
            while more:
                try:
                    async with monitored.interruptible():
                        body = await answer.reply.read_some()
                except ReplicaLost as lost:
                    self._pool.on_failure(answer.lease.replica, lost)
                    raise errors.replica_lost("within its answer") from lost
                more = bool(body)
                await send({"type": "http.response.body", "body": body, "more_body": more})
                call.sent_bytes += len(body)
                monitored.on_bytes()


def _length(reply: Reply) -> bytes | None:
    """Return the length of the body that the replica has announced."""
    return next((value for name, value in reply.headers if name == b"content-length"), None)
