"""The refusals of requests about conversation state, in OpenAI's shape."""

from __future__ import annotations

from headrace.gateway.errors import ApiError


def response_not_found(response_id: str) -> ApiError:
    """404: no such response, or another tenant's."""
    return ApiError(
        404,
        f"Response with id '{response_id[:100]}' not found.",
        code="response_not_found",
        param="response_id",
    )


def previous_not_found(given: str, missing: str | None = None) -> ApiError:
    """404: the request continues a response that is not kept.

    Args:
        given: the id in the request.
        missing: the id of the earlier response that is missing, if it is another one.
    """
    text = (
        f"Previous response with id '{given[:100]}' not found. It expired, was deleted, or lies at "
        "a gateway of another machine (gateway.conversations.object_url is not set)."
    )
    if missing is not None:
        text = (
            f"Previous response '{given[:100]}' cannot be continued: it continues '{missing}', "
            "which is no longer kept."
        )
    return ApiError(404, text, code="previous_response_not_found", param="previous_response_id")


def unfinished(response_id: str, status: str) -> ApiError:
    """400: the request continues a response that has not ended."""
    return ApiError(
        400,
        f"Previous response '{response_id}' is {status}. Wait until it is completed.",
        code="previous_response_unfinished",
        param="previous_response_id",
    )


def in_conversation(response_id: str, conversation_id: str) -> ApiError:
    """400: the request continues a response of a conversation by the response's id."""
    return ApiError(
        400,
        f"Response '{response_id}' belongs to a conversation. Send conversation: "
        f"'{conversation_id}' in place of previous_response_id.",
        code="response_in_conversation",
        param="previous_response_id",
    )


def conversation_not_found(conversation_id: str) -> ApiError:
    """404: no such conversation, or another tenant's."""
    return ApiError(
        404,
        f"Conversation with id '{conversation_id[:100]}' not found.",
        code="conversation_not_found",
        param="conversation",
    )


def item_not_found(item_id: str) -> ApiError:
    """404: no such item."""
    return ApiError(
        404, f"Item with id '{item_id[:100]}' not found.", code="item_not_found", param="item_id"
    )


def too_long(what: str, has: int, maximum: int, unit: str) -> ApiError:
    """400: a conversation with the request's own items is too long."""
    return ApiError(
        400,
        f"The conversation has {has} {unit} with the items of this request; {maximum} is the "
        "limit. Begin a new conversation, or send the items that the model still needs as input.",
        code="conversation_too_long",
        param=what,
    )


def not_in_background(response_id: str) -> ApiError:
    """400: a response is cancelled that was not asked for with `background`."""
    return ApiError(
        400,
        f"Response '{response_id}' was not created with background: true, so it cannot be "
        "cancelled.",
        code="not_a_background_response",
        param="response_id",
    )


def too_many_background(limit: int) -> ApiError:
    """429: the gateway has its maximum number of background responses of a model in progress."""
    return ApiError(
        429,
        f"{limit} background responses of this model are in progress at this gateway, which is the "
        "limit. Try again later.",
        code="too_many_background_responses",
        headers=[(b"retry-after", b"5")],
    )


def unavailable() -> ApiError:
    """503: the store of conversation state cannot be used now."""
    return ApiError(
        503,
        "The store of conversation state cannot be used now. Try again, or send the whole "
        "conversation as input.",
        code="conversation_state_unavailable",
        headers=[(b"retry-after", b"1")],
    )


def thread_full() -> ApiError:
    """400: a conversation would alone exceed the tenant's limit."""
    return ApiError(
        400,
        "The conversation would have more bytes than are kept for all conversations of a tenant "
        "(gateway.conversations.max_tenant_bytes).",
        code="conversation_too_long",
    )


def damaged(thread: str, name: str) -> ApiError:
    """500: a record does not open, so nothing is made of it."""
    return ApiError(
        500,
        f"The kept record {thread}/{name} is damaged and is not used. Send the whole conversation "
        "as input.",
        code="conversation_state_damaged",
    )
