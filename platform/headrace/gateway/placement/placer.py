"""The placement of a request: get the keys of its prompt's blocks, and ask `Cluster` for a plan.

Only the engine's own software knows a prompt's tokens, so the gateway asks a replica for the keys
of the prompt's blocks. It asks the replica that load and the prompt's first characters suggest,
since that replica will most likely answer the request, too. The plan goes to the replica that it
names, in a header.

With fewer than two healthy decode replicas that have reported, there is no choice, and the pool
chooses. If a prompt's keys are unknown or late, the request is placed by load and the
prompt's first characters (`replica_selection`). The time limit follows the size of the body.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import logging
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Annotated, Any, NamedTuple
from weakref import WeakKeyDictionary

import msgspec
import numpy as np
from msgspec import Meta

from headrace.gateway.backend import ReplicaInfo
from headrace.gateway.errors import Headers
from headrace.gateway.placement.endpoint_info import EndpointInfo
from headrace.gateway.placement.event_subscriber import EventSubscriber
from headrace.gateway.replica_pool import ReplicaPool
from headrace.gateway.upstream import ReplicaLost, Reply, Upstream
from headrace.router.cluster import NO_TARGETS, Cluster, LatencyTargets, Prompt, warm
from headrace.router.placement.request import NoDecodeReplicaError
from headrace.router.plan import Plan, RouterSettings
from headrace.router.plan_codec import encode
from headrace_decode.http.internal_port import KEYS_TARGET, PLAN_HEADER
from headrace_engine.reporting.report import Report
from headrace_engine.supervise import supervise
from headrace_kvstore.lookup.availability import MEDIA, AvailableRun

logger = logging.getLogger("headrace.gateway")

KEYS_LIMIT_S = 0.5
"""Longest wait for the keys of a short prompt."""
KEYS_BYTE_S = 3e-6
"""Wait added for each byte of the body. Tokenising a byte takes 0.7 to 1.2 us of an idle core
(SmolLM2's tokenizer, prose, EPYC), and computing its token takes a hundred times as long: a long
prompt is worth the wait."""
PLACED = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"})
"""Routes whose requests are prompts."""
MAX_KEYS_BYTES = 4 * 2**20
FOLLOW_INTERVAL_S = 1.0
COMPILE_LIMIT_S = 600.0
"""Time limit of the process that compiles the router; ten times its duration on a laptop."""

Text = Annotated[str, Meta(max_length=400)]
Count = Annotated[int, Meta(ge=0, le=2**40)]


class _Keys(msgspec.Struct):
    """A replica's answer with a prompt's keys (`headrace_decode.rendering.keys`)."""

    keys: str | None
    prompt_tokens: Count = 0
    local_only: Text | None = None
    machine: Text = ""
    adapter: Annotated[str, Meta(max_length=128)] = ""
    stored: Annotated[
        list[tuple[Text, Count, Annotated[float, Meta(ge=0)]]], Meta(max_length=64)
    ] = []


_decode_keys = msgspec.json.Decoder(_Keys).decode


class Placement(NamedTuple):
    """A plan, and the headers that carry it to the replica."""

    plan: Plan
    headers: Headers


class Placer:
    """The placement of one gateway. Call it from the gateway's event loop.

    Args:
        settings: settings of the router, such as the placement policy.
        endpoints: returns the address of each replica's events, decode and prefill, by replica id.
        pool: the decode replicas.
        upstream: the connections to them.
        min_replicas: number of decode replicas from which on their events are followed. A queue
            needs the reports of one; for a choice there must be two.
    """

    def __init__(
        self,
        settings: RouterSettings,
        endpoints: Callable[[], Awaitable[Mapping[str, EndpointInfo]]],
        pool: ReplicaPool,
        upstream: Upstream,
        min_replicas: int = 2,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.cluster = Cluster(settings, replica_health=pool.replica_health)
        self._list_endpoints, self._pool, self._upstream = endpoints, pool, upstream
        self.clock = clock
        self._subscriber = EventSubscriber(self.cluster.events, self._report, clock)
        self._task: asyncio.Task[None] | None = None
        self._min_replicas = min_replicas
        self._known: set[str] = set()

    def start(self) -> None:
        """Start to follow the replicas; call it in the event loop."""
        if self._task is None:
            self._task = supervise(self._follow, "follow the replicas")

    async def aclose(self) -> None:
        """Stop following the replicas."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        self._subscriber.close()

    @property
    def has_choice(self) -> bool:
        """Whether plans can be made: there are decode replicas to choose from."""
        return self.cluster.healthy_decodes() >= 2

    async def read_prompt(
        self,
        target: str,
        body: bytes,
        headers: Callable[[ReplicaInfo], Headers],
        affinity: bytes,
    ) -> Prompt | None:
        """Return a request's prompt, as placing needs it; None if it is unknown.

        Args:
            target, body: path and body of the request.
            headers: returns the headers that identify the gateway and the tenant to a replica.
            affinity: see `replica_selection`.
        """
        if target not in PLACED or not self.cluster.healthy_decodes():
            return None
        replica = self._pool.suggest(affinity)
        if replica is None:
            return None
        try:
            async with asyncio.timeout(KEYS_LIMIT_S + KEYS_BYTE_S * len(body)):
                prompt = await self._prompt(replica, target, body, headers(replica))
        except TimeoutError:
            self.cluster.counts["keys_late"] += 1
            return None
        except (ReplicaLost, ValueError) as error:
            self.cluster.counts["keys_failed"] += 1
            logger.debug("no keys from %s: %r", replica.replica_id, error)
            return None
        if prompt is None:
            self.cluster.counts["no_keys"] += 1
        return prompt

    def place(self, prompt: Prompt, targets: LatencyTargets = NO_TARGETS) -> Placement | None:
        """Return the plan for a request; None if no decode replica may be asked."""
        try:
            plan = self.cluster.plan(prompt, self.clock(), targets)
        except NoDecodeReplicaError:
            return None
        return Placement(plan, [(PLAN_HEADER, encode(plan))])

    def prefill_s(self, prompt: Prompt) -> float | None:
        """Return the seconds that a prompt takes an engine where it would be placed now; None if no
        decode replica may be asked."""
        try:
            return self.cluster.prefill_s(prompt, self.clock())
        except NoDecodeReplicaError:
            return None

    def withdraw(self, placed: Placement) -> None:
        """Withdraw a plan, because the replica that it names did not take the request."""
        self.cluster.withdraw(placed.plan, self.clock())

    @property
    def oldest_report_s(self) -> float:
        """Seconds since the report of the replica that has been silent longest."""
        return self.cluster.oldest_report_s(self.clock())

    def stats(self) -> dict[str, Any]:
        """Return the state in JSON types."""
        return {**self.cluster.stats(self.clock()), "subscriber": self._subscriber.stats()}

    async def _prompt(
        self, replica: ReplicaInfo, target: str, body: bytes, headers: Headers
    ) -> Prompt | None:
        """Return the prompt of a request; None if the replica cannot compute its keys.

        Raises:
            ReplicaLost: the replica gave no answer.
            ValueError: the replica's answer is invalid.
        """
        question = b'{"target":"%s","body":%s}' % (target.encode(), body)
        headers = [*headers, (b"content-type", b"application/json")]
        reply = await self._upstream.send(replica.url, "POST", KEYS_TARGET, headers, question)
        try:
            answer = _decode_keys(await _whole(reply))
        finally:
            reply.close()
        if answer.keys is None:
            return None
        stored = [AvailableRun(*run) for run in answer.stored]
        if not {run.medium for run in stored} <= set(MEDIA):
            raise ValueError("stored: there is no such medium")
        return Prompt(
            np.frombuffer(base64.b64decode(answer.keys, validate=True), "<u8").astype(np.uint64),
            answer.prompt_tokens,
            answer.local_only,
            answer.machine,
            stored,
            answer.adapter,
        )

    def _report(self, report: Report) -> None:
        try:
            self.cluster.report(report, self.clock())
        except ValueError as error:
            if not self.cluster.counts["bad_reports"]:
                logger.warning("a replica's report is left out: %s", error)
            self.cluster.counts["bad_reports"] += 1

    async def _follow(self) -> None:
        """Wait for `min_replicas` replicas, then keep following all replicas."""
        while len(self._pool) < self._min_replicas:
            await asyncio.sleep(FOLLOW_INTERVAL_S)
        await _compile_once()
        while True:
            try:
                endpoints = await self._list_endpoints()
                self._subscriber.follow(endpoints)
                for gone in self._known - endpoints.keys():
                    self.cluster.remove_replica(gone)
                self._known = set(endpoints)
                self.cluster.expire(self.clock())
            except Exception as error:
                logger.warning("cannot list the addresses of the replicas' events: %r", error)
            await asyncio.sleep(FOLLOW_INTERVAL_S)


_compiling: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = WeakKeyDictionary()
_has_compiled = False


async def _compile_once() -> None:
    """Compile the router, unless a placer of this process has; wait for one that does."""
    global _has_compiled
    async with _compiling.setdefault(asyncio.get_running_loop(), asyncio.Lock()):
        if not _has_compiled:
            await _compile()
            _has_compiled = True


async def _compile() -> None:
    """Have another process compile the router, so that no request waits; then load the result.

    If the process fails, a thread compiles: requests wait for it at times, but are placed.
    """
    command = sys.executable, "-c", "from headrace.router.cluster import warm; warm()"
    try:
        child = await asyncio.create_subprocess_exec(*command)
        try:
            async with asyncio.timeout(COMPILE_LIMIT_S):
                status = await child.wait()
        finally:
            if child.returncode is None:
                child.kill()
                await child.wait()
        if status:
            logger.warning("the process that compiles the router ended with status %d", status)
    except (OSError, TimeoutError) as error:
        logger.warning("no other process compiled the router, a thread does: %r", error)
    await asyncio.to_thread(warm)


async def _whole(reply: Reply) -> bytes:
    """Read the whole body of an answer.

    Raises:
        ValueError: the answer is an error, or too long.
    """
    if reply.status != 200:
        raise ValueError(f"answered {reply.status}")
    parts, size = [await reply.read_some()], 0
    while parts[-1]:
        size += len(parts[-1])
        if size > MAX_KEYS_BYTES:
            raise ValueError(f"more than {MAX_KEYS_BYTES} bytes")
        parts.append(await reply.read_some())
    return b"".join(parts)
