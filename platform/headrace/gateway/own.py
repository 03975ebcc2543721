"""The gateway's own routes: documents, orders to the app, prompts to warm, corpora, the console.

The gateway answers every path below `/headrace/`, with 404 if the path does not exist.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from functools import partial
from urllib.parse import quote

import msgspec

from headrace.console.files import find as console_file
from headrace.console.files import is_console
from headrace.gateway import errors
from headrace.gateway.admin import Admin
from headrace.gateway.asgi import JSON_TYPE
from headrace.gateway.asked import Asked, Intake
from headrace.gateway.ingress.keys import Caller
from headrace.gateway.memory import MEMORY, MemoryAdmin, tenant_of
from headrace.gateway.openapi import MODELS, ROUTER, SPECULATION, STORE, WARM
from headrace.gateway.relay.relay import Relay
from headrace.gateway.replicas import ReplicaPool

OURS = "/headrace/"
MAX_ORDER_BODY_BYTES = 1_000
READS = ("GET", "HEAD")


def needs_no_key(path: str) -> bool:
    """Return whether requests for a path need no key.

    The health and the console's files need none; the files hold no data of the app.
    """
    return path == "/health" or is_console(path)


Handler = Callable[[Asked], Awaitable[None]]


async def redirect(asked: Asked) -> None:
    """Redirect to the path without trailing slashes, as Starlette does in vLLM's own server."""
    path, _, query = asked.call.target.partition("?")
    place = quote(path.rstrip("/")) + (f"?{query}" if query else "")
    await asked.answer(307, b"", (b"location", place.encode("latin-1")))


class OwnRoutes:
    """The handlers of the gateway's own routes.

    Args:
        admin: makes the documents and sends the orders.
        corpora: handles the operations on corpora.
        intake: reads bodies.
        place: takes one of the places for requests that replicas work on.
        admitted: passes a caller's request with a number of bytes through the admission queue.
        pool: the replicas.
        relay: sends a request to a replica.
    """

    def __init__(
        self,
        admin: Admin,
        corpora: MemoryAdmin,
        intake: Intake,
        *,
        place: Callable[[], AbstractContextManager[None]],
        admitted: Callable[[Caller, int], AbstractAsyncContextManager[object]],
        pool: ReplicaPool,
        relay: Relay,
    ) -> None:
        self._admin, self._corpora, self._intake = admin, corpora, intake
        self._place, self._pool, self._relay = place, pool, relay
        self._admitted = admitted

    def find(self, path: str) -> Handler | None:
        """Return the handler of a path; None if replicas answer it."""
        if path in (ROUTER, SPECULATION):
            return self._order
        if path == WARM:
            return self._warm
        if path == STORE:
            return self._store
        if path == MEMORY or path.startswith(MEMORY + "/"):
            return self._memory
        if path.startswith(OURS) or self._admin.find(path) is not None:
            return self._document
        if path.startswith(MODELS + "/"):
            return self._model
        if is_console(path):
            return self._console
        return None

    def has(self, path: str) -> bool:
        """Return whether a path exists, at the gateway or at the replicas."""
        if path in (ROUTER, SPECULATION, WARM, STORE, MEMORY) or self._admin.find(path) is not None:
            return True
        return bool(self._pool.routes.at(path))

    async def _order(self, asked: Asked) -> None:
        """Change the plan policy or the drafting of the app."""
        asked.only("PUT")
        self._intake.check_admin(asked)
        wanted = await self._intake.json(asked, MAX_ORDER_BODY_BYTES)
        give = self._admin.set_policy if asked.path == ROUTER else self._admin.set_speculation
        await asked.answer(200, await give(wanted), JSON_TYPE)

    async def _warm(self, asked: Asked) -> None:
        """Make prompts' KV now, in every decode replica; this concerns all tenants."""
        asked.only("POST")
        self._intake.check_admin(asked)
        with self._place():
            wanted = await self._intake.json(asked)
            self._intake.answer_in_time(asked)
            body = await self._admin.warm(
                wanted,
                tenant=asked.call.tenant,
                admitted=partial(self._admitted, asked.caller),
            )
        await asked.answer(200, body, JSON_TYPE)

    async def _store(self, asked: Asked) -> None:
        """List the pinned blocks of the machines' stores, or carry out an order about blocks."""
        self._intake.check_admin(asked)
        asked.only(*READS, "POST")
        wanted = None
        if asked.call.method == "POST":
            wanted = await self._intake.json(asked, MAX_ORDER_BODY_BYTES)
        self._intake.answer_in_time(asked)
        await asked.answer(200, await self._admin.store(wanted), JSON_TYPE)

    async def _memory(self, asked: Asked) -> None:
        """List, load or drop corpora of the drafting memories."""
        self._intake.check_admin(asked)
        corpus, method = asked.path[len(MEMORY) + 1 :], asked.call.method
        asked.only(*(("PUT", "DELETE") if corpus else READS))
        wanted = await self._intake.json(asked) if method == "PUT" else {}
        self._intake.answer_in_time(asked, may_leave=True)
        if method == "PUT":
            answer = await self._corpora.load(corpus, wanted)
        elif method == "DELETE":
            answer = await self._corpora.drop(corpus, tenant_of(asked.call.target))
        else:
            answer = await self._corpora.listing()
        await asked.answer(200, msgspec.json.encode(answer), JSON_TYPE)

    async def _document(self, asked: Asked) -> None:
        """Answer with a document, or with 404."""
        document = self._admin.find(asked.path)
        if document is None:
            raise errors.not_found(asked.path)
        if asked.path.startswith(OURS):
            self._intake.check_admin(asked)
        asked.only(*READS)
        status, body, content_type = await self._admin.answer(document, self._pool)
        await asked.answer(status, body, (b"content-type", content_type))

    async def _console(self, asked: Asked) -> None:
        """Answer with a file of the console."""
        asked.only(*READS)
        file = console_file(asked.path)
        if file is None:
            raise errors.not_found(asked.path)
        if asked.seen.get(b"if-none-match") == file.etag:
            await asked.answer(304, b"", *file.headers)
        else:
            await asked.answer(200, file.body, *file.headers)

    async def _model(self, asked: Asked) -> None:
        """Answer with one model of a replica's list, since vLLM has no route for it."""
        asked.only(*READS)
        self._intake.answer_in_time(asked)
        asked.call.method, asked.call.target = "GET", MODELS
        answer = await self._relay.fetch(asked.call)
        answer.close()
        if answer.reply.status != 200:  # pass on the replica's own error
            headers = dict(answer.reply.headers)
            kind = headers.get(b"content-type", b"application/json")
            await asked.answer(answer.reply.status, answer.body, (b"content-type", kind))
            return
        body = self._admin.model(answer.body, asked.path[len(MODELS) + 1 :])
        await asked.answer(200, body, JSON_TYPE)
