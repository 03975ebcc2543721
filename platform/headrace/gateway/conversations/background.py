"""Responses that are made in the background: queued, run and ended by the gateway that took them.

They use the relay like any request, in a class of their own that is sent while no other request
waits (with admission). The gateway gives a sign of life to the store while it runs some, and reads
there whether another gateway cancelled or deleted one. Those of a gateway that died are found as
failed: running them again could cost twice, and their clients poll and can decide.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import msgspec

from headrace.gateway.admission.slo_classes import SloClass
from headrace.gateway.conversations import refusals
from headrace.gateway.conversations.records import FAILED, IN_PROGRESS
from headrace.gateway.conversations.state import ConversationState
from headrace.gateway.conversations.tenant_state import BEAT_S, TenantState
from headrace.gateway.conversations.turn import TurnRecorder
from headrace.gateway.errors import ApiError
from headrace.gateway.ingress.rate_limit import RateLimit
from headrace.gateway.kept_records.record_cipher import GATEWAYS
from headrace.gateway.relay.call import Call

logger = logging.getLogger("headrace.gateway")

CANCELLED_STATUS = 499
"""Status of a cancelled response in logs and metrics, as of a client that hung up."""
PLACE_S = 1.0
"""Time after which a response that found all places of the gateway taken asks again."""

Message = MutableMapping[str, Any]
Run = Callable[
    [Call, Callable[[Message], Awaitable[None]], SloClass, Callable[[], Awaitable[None]]],
    Awaitable[None],
]
"""Takes one of the gateway's places, calls the last function, and relays a call; the answer goes to
the first function. It raises ApiError if there is no place (429) or no answer."""


@dataclass(slots=True, eq=False)
class _Running:
    """A response that this gateway makes: its tenant, its model and its task."""

    tenant: str | None
    model_id: str
    task: asyncio.Task[Any]


class BackgroundResponses:
    """The background responses of one gateway.

    Args:
        state: keeps them.
        run: relays a call.
        max_responses: maximum number of one model that are queued or run at once.
        timeout_s: time limit of each, from its start to its end.
        on_end: called with the call of each that has ended.
    """

    def __init__(
        self,
        state: ConversationState,
        run: Run,
        *,
        max_responses: int,
        timeout_s: float,
        on_end: Callable[[Call], None],
    ) -> None:
        self._state, self._run = state, run
        self._max_responses, self._timeout_s, self._on_end = max_responses, timeout_s, on_end
        self._slo = SloClass("background", max_wait_s=timeout_s, background=True)
        self._owner = secrets.token_hex(8)
        self._running: dict[str, _Running] = {}
        self._beating: asyncio.Task[None] | None = None
        self._is_closing = False

    def __len__(self) -> int:
        return len(self._running)

    async def start(self, call: Call, rate_limit: RateLimit) -> bytes:
        """Queue the response to a call; return it as JSON. It is made even if the client hangs up.

        Args:
            call: the client's call; its body is taken from it.
            rate_limit: that of the client's key, where the response counts until it ends.

        Raises:
            ApiError: 429, there are too many of its model; 503, it cannot be kept.
        """
        of_model = [each for each in self._running.values() if each.model_id == call.model_id]
        if len(of_model) >= self._max_responses:
            raise refusals.too_many_background(self._max_responses)
        own = replace(call, started=time.perf_counter(), journal=None, resume_lines=b"")
        own.write_nowait = lambda piece: False
        call.body, call.reservation = b"", None
        begun = asyncio.create_task(self._begin(own, rate_limit))
        self._running[_recorder(own).response_id] = _Running(own.tenant, own.model_id, begun)
        return await asyncio.shield(begun)

    async def _begin(self, call: Call, rate_limit: RateLimit) -> bytes:
        """Keep a response as queued, and begin to run it; return it as JSON."""
        recorder = _recorder(call)
        response_id, at_s = recorder.response_id, int(time.time())
        try:
            await self._state.run(GATEWAYS, TenantState.beat, self._owner)
            body = await recorder.begin_background(call.body, self._owner, call.model_id, at_s)
        except BaseException:
            call.drop_body()
            del self._running[response_id]
            raise
        task = asyncio.create_task(self._work(call, rate_limit))
        self._running[response_id] = _Running(call.tenant, call.model_id, task)
        task.add_done_callback(lambda _: self._running.pop(response_id))
        if self._beating is None:
            self._beating = asyncio.create_task(self._beat())
        return body

    async def cancel(self, tenant: str | None, response_id: str) -> bytes:
        """Cancel a response, whichever gateway runs it; return it as JSON.

        Raises:
            ApiError: as `TenantState.cancel`.
        """
        document = await self._state.run(tenant, TenantState.cancel, response_id)
        self.stop(tenant, response_id)
        return document

    def stop(self, tenant: str | None, response_id: str) -> None:
        """Stop a response if this gateway runs it; it was cancelled or deleted before."""
        running = self._running.get(response_id)
        if running is not None and running.tenant == tenant:
            running.task.cancel()

    async def aclose(self) -> None:
        """Stop all; they are kept as failed."""
        self._is_closing = True
        tasks = [running.task for running in self._running.values()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        if self._beating is not None:
            self._beating.cancel()

    async def _work(self, call: Call, rate_limit: RateLimit) -> None:
        """Run one response to its end."""
        response_id = _recorder(call).response_id
        error: dict[str, str] | None = None
        message = ""
        try:
            with rate_limit.hold():
                async with asyncio.timeout(self._timeout_s):
                    error = await self._relay(call)
        except TimeoutError:
            message = f"The response was not finished within {self._timeout_s:g} s."
        except asyncio.CancelledError:
            if not self._is_closing:
                call.status = CANCELLED_STATUS
                self._on_end(call)
                raise
            message = "The gateway that ran this response in the background was stopped."
        except Exception:
            logger.exception("the background response %s failed", response_id)
            message = "The gateway failed on this request."
        finally:
            call.drop_body()
        if message:
            error = {"code": "server_error", "message": message}
        call.error = None if error is None else error["code"]
        self._on_end(call)
        if error is not None:
            with contextlib.suppress(ApiError):
                end = TenantState.set_status
                await self._state.run(call.tenant, end, response_id, FAILED, error)

    async def _relay(self, call: Call) -> dict[str, str] | None:
        """Relay the call; return its error, or None if the answer is kept."""
        answer = _Collector()
        while True:
            try:
                await self._run(call, answer.send, self._slo, partial(self._on_place, call))
                break
            except ApiError as error:
                if error.code == "too_many_requests":
                    await asyncio.sleep(PLACE_S)
                    continue
                return {"code": error.code or "server_error", "message": error.message}
        if answer.status != 200:
            return answer.error()
        check, given = TenantState.is_unfinished, _recorder(call).response_id
        if await self._state.run(call.tenant, check, given):
            message = "The answer is too long, or the store failed, so that it is not kept."
            return {"code": "server_error", "message": message}
        return None

    async def _on_place(self, call: Call) -> None:
        """Set the response's status when its call has got a place."""
        set_status, given = TenantState.set_status, _recorder(call).response_id
        with contextlib.suppress(ApiError):
            await self._state.run(call.tenant, set_status, given, IN_PROGRESS)

    async def _beat(self) -> None:
        """Give signs of life, and stop responses that were cancelled or deleted elsewhere."""
        try:
            while self._running:
                await asyncio.sleep(BEAT_S)
                try:
                    await self._state.run(GATEWAYS, TenantState.beat, self._owner)
                    for response_id, running in list(self._running.items()):
                        tenant = running.tenant
                        check = TenantState.is_unfinished
                        if not await self._state.run(tenant, check, response_id):
                            self.stop(tenant, response_id)
                except ApiError:
                    continue  # the store cannot be used now, as the log says
        finally:
            self._beating = None


def _recorder(call: Call) -> TurnRecorder:
    assert isinstance(call.recorder, TurnRecorder)
    return call.recorder


class _Collector:
    """The status of an answer, and its body if it is an error; nothing else of it is needed."""

    def __init__(self) -> None:
        self.status = 0
        self._body = b""

    async def send(self, message: Message) -> None:
        """Take an ASGI message."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
        elif self.status != 200:
            self._body += message.get("body", b"")

    def error(self) -> dict[str, str]:
        """Return the code and message of an error."""
        try:
            error = msgspec.json.decode(self._body)["error"]
            return {"code": str(error.get("code") or "server_error"), "message": error["message"]}
        except (msgspec.DecodeError, LookupError, TypeError, AttributeError):
            message = f"The replica answered {self.status}."
            return {"code": "server_error", "message": message}
