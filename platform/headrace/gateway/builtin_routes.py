"""The gateway's own routes: documents, commands to the app, prompts to warm, corpora, the console.

The gateway answers every path below `/headrace/`, with 404 if the path does not exist.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from urllib.parse import quote

import msgspec

from headrace.console.files import CONSOLE, is_console
from headrace.console.files import find as console_file
from headrace.gateway import errors
from headrace.gateway.adapters import LOAD_ADAPTER, UNLOAD_ADAPTER, AdapterAdmin
from headrace.gateway.admin import Admin
from headrace.gateway.asgi import JSON_TYPE
from headrace.gateway.batches.routes import BatchRoutes
from headrace.gateway.body_reader import BodyReader
from headrace.gateway.conversations.routes import ConversationRoutes
from headrace.gateway.corpora import CORPORA, CorpusAdmin, tenant_of
from headrace.gateway.models.model_list import ModelList, listed_cards
from headrace.gateway.models.model_table import ModelTable
from headrace.gateway.openapi import METRICS, MODELS, ROUTER, SPECULATION, STORE, WARM
from headrace.gateway.relayed_routes import RelayedRoutes
from headrace.gateway.request_context import RequestContext
from headrace.gateway.usage.routes import UsageRoutes
from headrace.observability.metrics_filter import filter_metrics, wanted_names

OURS = "/headrace/"
MAX_COMMAND_BODY_BYTES = 1_000
MAX_ADAPTER_BODY_BYTES = 10_000
READS = ("GET", "HEAD")


def needs_no_key(path: str) -> bool:
    """Return whether requests for a path need no key.

    The health and the console's files need none; the files hold no data of the app.
    """
    return path == "/health" or is_console(path)


Handler = Callable[[RequestContext], Awaitable[None]]


async def open_console(context: RequestContext) -> None:
    """Redirect a browser to the web console."""
    await context.answer(307, b"", (b"location", CONSOLE.encode()))


async def redirect(context: RequestContext) -> None:
    """Redirect to the path without trailing slashes, as Starlette does in vLLM's own server."""
    path, _, query = context.call.target.partition("?")
    place = quote(path.rstrip("/")) + (f"?{query}" if query else "")
    await context.answer(307, b"", (b"location", place.encode("latin-1")))


class BuiltinRoutes:
    """The handlers of the gateway's own routes.

    Args:
        admin: makes the documents and sends the commands.
        corpora: handles the operations on corpora.
        adapters: handles the operations on LoRA adapters; None for an app without them.
        body_reader: reads bodies.
        relayed: counts the gateway's own requests to replicas, and admits them.
        models: the models.
        usage: the routes of usage.
        conversations: the routes of kept responses and conversations; None if none are kept.
        batches: the routes of files and batches; None if there are none.
    """

    def __init__(
        self,
        admin: Admin,
        corpora: CorpusAdmin,
        adapters: AdapterAdmin | None,
        body_reader: BodyReader,
        *,
        relayed: RelayedRoutes,
        models: ModelTable,
        usage: UsageRoutes,
        conversations: ConversationRoutes | None = None,
        batches: BatchRoutes | None = None,
    ) -> None:
        self._admin, self._corpora, self._body_reader = admin, corpora, body_reader
        self._relayed, self._models = relayed, models
        self._usage = usage
        self._stateful = [routes for routes in (conversations, batches) if routes is not None]
        self._model_list = ModelList(models, MODELS)
        self._handlers: dict[str, Handler] = {
            ROUTER: self._command,
            SPECULATION: self._command,
            WARM: self._warm,
            STORE: self._store,
            CORPORA: self._corpus,
        }
        self._adapters = adapters
        if adapters is not None:
            self._handlers |= {LOAD_ADAPTER: self._adapter, UNLOAD_ADAPTER: self._adapter}

    def find(self, path: str) -> Handler | None:
        """Return the handler of a path; None if replicas answer it."""
        if (handler := self._handlers.get(path)) is not None:
            return handler
        if path.startswith(CORPORA + "/"):
            return self._corpus
        if self._usage.has(path):
            return self._usage.handle
        if path.startswith(OURS) or self._admin.find(path) is not None:
            return self._document
        if path == MODELS:
            return self._list_models
        if path.startswith(MODELS + "/"):
            return self._model
        for routes in self._stateful:
            if routes.has(path):
                return routes.handle
        if is_console(path):
            return self._console
        return None

    def has(self, path: str) -> bool:
        """Return whether a path exists, at the gateway or at the replicas."""
        if (
            path in self._handlers
            or self._usage.has(path)
            or self._admin.find(path) is not None
            or console_file(path)
        ):
            return True
        ours = any(routes.has(path) for routes in self._stateful)
        return ours or bool(self._models.routes.at(path))

    async def _command(self, context: RequestContext) -> None:
        """Change the plan policy or the speculative decoding of the app."""
        context.allow_methods("PUT")
        self._body_reader.check_admin(context)
        wanted = await self._body_reader.json(context, MAX_COMMAND_BODY_BYTES)
        send = self._admin.set_policy if context.path == ROUTER else self._admin.set_speculation
        await context.answer(200, await send(wanted), JSON_TYPE)

    async def _warm(self, context: RequestContext) -> None:
        """Make prompts' KV now, in every decode replica; this concerns all tenants."""
        context.allow_methods("POST")
        self._body_reader.check_admin(context)
        with self._relayed.take_place():
            wanted = await self._body_reader.json(context)
            self._body_reader.limit_answer_time(context)
            asked = self._models.asked(wanted, context.caller)
            model = await self._models.choose(asked, context.caller)
            with model.take_place():
                body = await self._admin.warm(
                    *(wanted, model.backend),
                    tenant=context.call.tenant,
                    admitted=partial(self._relayed.admit, model, context.caller),
                )
        await context.answer(200, body, JSON_TYPE)

    async def _store(self, context: RequestContext) -> None:
        """List the pinned blocks of the machines' stores, or carry out an action on blocks."""
        self._body_reader.check_admin(context)
        context.allow_methods(*READS, "POST")
        wanted = None
        if context.call.method == "POST":
            wanted = await self._body_reader.json(context, MAX_COMMAND_BODY_BYTES)
        self._body_reader.limit_answer_time(context)
        await context.answer(200, await self._admin.store(wanted), JSON_TYPE)

    async def _corpus(self, context: RequestContext) -> None:
        """List, load or remove corpora of the retrieval memories."""
        self._body_reader.check_admin(context)
        corpus, method = context.path[len(CORPORA) + 1 :], context.call.method
        context.allow_methods(*(("PUT", "DELETE") if corpus else READS))
        wanted = await self._body_reader.json(context) if method == "PUT" else {}
        self._body_reader.limit_answer_time(context, may_leave=True)
        if method == "PUT":
            answer = await self._corpora.load(corpus, wanted)
        elif method == "DELETE":
            answer = await self._corpora.drop(corpus, tenant_of(context.call.target))
        else:
            answer = await self._corpora.listing()
        await context.answer(200, msgspec.json.encode(answer), JSON_TYPE)

    async def _adapter(self, context: RequestContext) -> None:
        """Load or unload a LoRA adapter at all replicas."""
        assert self._adapters is not None
        self._body_reader.check_admin(context)
        context.allow_methods("POST")
        wanted = await self._body_reader.json(context, MAX_ADAPTER_BODY_BYTES)
        self._body_reader.limit_answer_time(context)
        change = self._adapters.load if context.path == LOAD_ADAPTER else self._adapters.unload
        await context.answer(200, msgspec.json.encode(await change(wanted)), JSON_TYPE)

    async def _document(self, context: RequestContext) -> None:
        """Answer with a document, or with 404."""
        document = self._admin.find(context.path)
        if document is None:
            raise errors.not_found(context.path)
        if context.path.startswith(OURS):
            self._body_reader.check_admin(context)
        context.allow_methods(*READS)
        status, body, content_type = await self._admin.answer(document, self._models)
        if context.path == METRICS and (names := wanted_names(context.call.target)):
            body = await asyncio.to_thread(filter_metrics, body, names)  # a page may have megabytes
        await context.answer(status, body, (b"content-type", content_type))

    async def _console(self, context: RequestContext) -> None:
        """Answer with a file of the console."""
        context.allow_methods(*READS)
        file = console_file(context.path)
        if file is None:
            raise errors.not_found(context.path)
        if context.headers.get(b"if-none-match") == file.etag:
            await context.answer(304, b"", *file.headers)
        else:
            await context.answer(200, file.body, *file.headers)

    async def _list_models(self, context: RequestContext) -> None:
        """Answer with the models that the key may use; of a single model, a replica answers."""
        if not self._lists_models(context):
            context.call.route = self._models.routes.at(MODELS).get(context.call.method)
            await self._relayed.handle(context)
            return
        context.allow_methods(*READS)
        self._body_reader.limit_answer_time(context)
        cards = await self._model_list.cards(context.call, context.caller.models)
        body = msgspec.json.encode({"object": "list", "data": cards})
        await context.answer(200, body, JSON_TYPE)

    def _lists_models(self, context: RequestContext) -> bool:
        """Whether the gateway itself lists the models: names decide, or the key is limited."""
        return bool(self._models.names) or context.caller.models is not None

    async def _model(self, context: RequestContext) -> None:
        """Answer with one model of a replica's list, since vLLM has no route for it."""
        context.allow_methods(*READS)
        self._body_reader.limit_answer_time(context)
        wanted = context.path[len(MODELS) + 1 :]
        if self._lists_models(context):
            cards = await self._model_list.cards(context.call, context.caller.models)
        else:
            context.call.method, context.call.target = "GET", MODELS
            (model,) = self._models
            answer = await model.fetcher.fetch(context.call)
            answer.close()
            if answer.reply.status != 200:  # pass on the replica's own error
                headers = dict(answer.reply.headers)
                kind = headers.get(b"content-type", b"application/json")
                await context.answer(answer.reply.status, answer.body, (b"content-type", kind))
                return
            cards = listed_cards(answer.body)
        card = next((card for card in cards if card["id"] == wanted), None)
        if card is None:
            raise errors.model_not_found(wanted)
        await context.answer(200, msgspec.json.encode(card), JSON_TYPE)
