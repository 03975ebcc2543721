"""Converts errors to the format that an API's clients expect."""

from __future__ import annotations

import json
import re
from typing import Any

MAX_SEARCHED, MAX_FIELDS = 16_384, 5
"""Limits of `plain`: characters of the message that are searched, and fields that are named."""
_WRONG_FIELD = re.compile(
    r"""'loc': \(([^()]{0,200})\), 'msg': (?:'([^'\\]{1,500})'|"([^"\\]{1,500})")"""
)
"""One error in vLLM's answer to a body that its schema refuses."""

ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}
"""Anthropic's types of errors by status (https://docs.anthropic.com/en/api/errors)."""


def anthropic_type(status: int) -> str:
    """Return Anthropic's type of an error with this status."""
    return ANTHROPIC_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")


def anthropic_error(status: int, message: str) -> dict[str, Any]:
    """Return an error as Anthropic's API writes it."""
    return {"type": "error", "error": {"type": anthropic_type(status), "message": message}}


def openai_error(message: str, param: str | None) -> dict[str, Any]:
    """Return a refusal with status 400 as vLLM's application writes it."""
    error = {"message": message, "type": "BadRequestError", "param": param, "code": 400}
    return {"error": error}


def plain(message: str) -> str:
    """Return a message without Python's notation: a pydantic error's fields and their faults."""
    found = _WRONG_FIELD.findall(message[:MAX_SEARCHED])[:MAX_FIELDS]
    if not found:
        return message
    faults = []
    for place, single, double in found:
        names = re.findall(r"[\w-]+", place)
        field = ".".join(names[1:] if names[:1] == ["body"] else names)
        faults.append(f"{field}: {(single or double).removeprefix('Value error, ')}")
    return "; ".join(faults)


def message_of(body: bytes) -> str | None:
    """Return the message in an error's document, in either format; None if there is none."""
    try:
        document = json.loads(body)
        message = document["error"]["message"]
    except (ValueError, LookupError, TypeError):
        return None
    return message if isinstance(message, str) else None
