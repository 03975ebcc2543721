"""The routes of kept responses and conversations: `/v1/responses/ID...`, `/v1/conversations...`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any

import msgspec
from pydantic import BaseModel, ConfigDict, Field

from headrace.gateway import errors
from headrace.gateway.asgi import JSON_TYPE
from headrace.gateway.body_reader import BodyReader
from headrace.gateway.conversations import items, refusals
from headrace.gateway.conversations.background import BackgroundResponses
from headrace.gateway.conversations.state import ConversationState
from headrace.gateway.conversations.tenant_state import TenantState
from headrace.gateway.errors import bad_field
from headrace.gateway.ingress.limits import validated
from headrace.gateway.request_context import RequestContext

RESPONSES, CONVERSATIONS = "/v1/responses", "/v1/conversations"
RELAYED = ("", "render")
"""The ends of paths below `/v1/responses/` that replicas answer."""
MAX_ADDED = 20
"""Maximum number of items that a request adds to a conversation, as at OpenAI's service."""
READS = ("GET", "HEAD")
_CONVERSATION_READS = ("GET", "HEAD", "POST", "DELETE")

Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]],
    Field(max_length=16),
]
Added = Annotated[list[dict[str, Any]], Field(max_length=MAX_ADDED)]


class ConversationCreate(BaseModel):
    """A new conversation."""

    model_config = ConfigDict(extra="ignore")

    items: Added | None = Field(default=None, description="Its first items, at most 20.")
    metadata: Metadata | None = Field(
        default=None, description="Up to 16 texts of the client's own, by name."
    )


class ConversationUpdate(BaseModel):
    """A change of a conversation."""

    model_config = ConfigDict(extra="ignore")

    metadata: Metadata | None = Field(description="Replaces the metadata; null removes it.")


class ConversationItems(BaseModel):
    """Items to add to a conversation."""

    model_config = ConfigDict(extra="ignore")

    items: Annotated[Added, Field(min_length=1)] = Field(description="At most 20 items.")


class ConversationRoutes:
    """The handlers of the routes.

    Args:
        state: the conversation state.
        body_reader: reads bodies.
        background: the background responses of this gateway.
        max_bytes: of a conversation's items as JSON.
    """

    def __init__(
        self,
        state: ConversationState,
        body_reader: BodyReader,
        background: BackgroundResponses,
        max_bytes: int,
    ) -> None:
        self._state, self._body_reader = state, body_reader
        self._background, self._max_bytes = background, max_bytes

    def has(self, path: str) -> bool:
        """Return whether a path is one of these routes'."""
        if path.startswith(RESPONSES + "/"):
            return path[len(RESPONSES) + 1 :] not in RELAYED
        return path == CONVERSATIONS or path.startswith(CONVERSATIONS + "/")

    async def handle(self, context: RequestContext) -> None:
        """Answer a request."""
        parts = context.path.split("/")[3:]
        if not all(parts):
            raise errors.not_found(context.path)
        if context.path.startswith(RESPONSES):
            document = await self._response(context, *parts)
        else:
            document = await self._conversations(context, *parts)
        await context.answer(200, document, JSON_TYPE)

    # Responses.

    async def _response(self, context: RequestContext, given: str, *rest: str) -> bytes:
        tenant, state = context.call.tenant, self._state
        if rest == ("cancel",):
            context.allow_methods("POST")
            return await self._background.cancel(tenant, given)
        if rest == ("input_items",):
            context.allow_methods(*READS)
            found = await state.run(tenant, TenantState.input_items, given)
            return msgspec.json.encode(items.page(found, context.query()))
        if rest:
            raise errors.not_found(context.path)
        context.allow_methods(*READS, "DELETE")
        if context.call.method == "DELETE":
            await state.run(tenant, TenantState.delete_response, given)
            self._background.stop(tenant, given)
            return msgspec.json.encode({"id": given, "object": "response", "deleted": True})
        if context.query()("stream") == "true":
            raise bad_field("stream", "is not possible for a response that is kept")
        return await state.run(tenant, TenantState.document, given)

    # Conversations.

    async def _conversations(self, context: RequestContext, *parts: str) -> bytes:
        if not parts:
            context.allow_methods("POST")
            wanted = await self._body(context, ConversationCreate)
            added = wanted.items or []
            items.check_items(added)
            create = TenantState.create_conversation
            made = await self._run(context, create, wanted.metadata or {}, added)
            return msgspec.json.encode(made)
        given, rest = parts[0], parts[1:]
        if not rest:
            return msgspec.json.encode(await self._conversation(context, given))
        if rest[0] != "items" or len(rest) > 2:
            raise errors.not_found(context.path)
        if len(rest) == 2:
            return msgspec.json.encode(await self._item(context, given, rest[1]))
        return msgspec.json.encode(await self._items(context, given))

    async def _conversation(self, context: RequestContext, given: str) -> dict[str, Any]:
        context.allow_methods(*_CONVERSATION_READS)
        if context.call.method == "DELETE":
            await self._run(context, TenantState.delete_conversation, given)
            return {"id": given, "object": "conversation.deleted", "deleted": True}
        if context.call.method == "POST":
            wanted = await self._body(context, ConversationUpdate)
            update = TenantState.update_conversation
            return await self._run(context, update, given, wanted.metadata or {})
        return await self._run(context, TenantState.conversation, given)

    async def _items(self, context: RequestContext, given: str) -> dict[str, Any]:
        context.allow_methods(*READS, "POST")
        if context.call.method == "POST":
            wanted = await self._body(context, ConversationItems)
            items.check_items(wanted.items)
            add = TenantState.add_items
            added = await self._run(context, add, given, wanted.items, self._max_bytes)
            return items.page(added, {"order": "asc"}.get)
        found = await self._run(context, TenantState.conversation_items, given, self._max_bytes)
        return items.page(found, context.query())

    async def _item(self, context: RequestContext, given: str, item: str) -> dict[str, Any]:
        context.allow_methods(*READS, "DELETE")
        if context.call.method == "DELETE":
            return await self._run(context, TenantState.delete_item, given, item, self._max_bytes)
        found = await self._run(context, TenantState.conversation_items, given, self._max_bytes)
        for each in found:
            if each["id"] == item:
                return each
        raise refusals.item_not_found(item)

    async def _run(self, context: RequestContext, work: Callable[..., Any], *args: Any) -> Any:
        return await self._state.run(context.call.tenant, work, *args)

    async def _body(self, context: RequestContext, model: type[Any]) -> Any:
        wanted: Mapping[str, Any] = await self._body_reader.json(context)
        return validated(model, wanted)
