"""What `POST /headrace/v1/warm` may ask: prompts whose KV shall be made now, and perhaps pinned."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headrace.gateway.errors import bad_field
from headrace.gateway.limits import check_known

MAX_PROMPTS = 256
FIELDS = ("prompts", "chats", "cache_salt", "pin")


@dataclass(frozen=True, slots=True)
class WarmRequest:
    """A checked request.

    Attributes:
        bodies: each `{"prompt": text or token ids}` or `{"messages": [...]}`.
        salt: the tenant's cache salt; empty for none.
        pin: whether the blocks are kept in DRAM until they are cleared.
    """

    bodies: list[dict[str, Any]]
    salt: str
    pin: bool

    @classmethod
    def parse(cls, wanted: Mapping[str, Any]) -> WarmRequest:
        """Read a request's body.

        Raises:
            ApiError: 400, naming the field.
        """
        check_known(wanted, FIELDS)
        prompts, chats = wanted.get("prompts", []), wanted.get("chats", [])
        if not isinstance(prompts, list) or not all(map(_is_prompt, prompts)):
            raise bad_field("prompts", "must be a list of texts or of lists of token ids")
        if not isinstance(chats, list) or not all(map(_is_chat, chats)):
            raise bad_field("chats", "must be a list of lists of messages")
        if not 1 <= len(prompts) + len(chats) <= MAX_PROMPTS:
            raise bad_field("prompts", f"and chats must be 1 to {MAX_PROMPTS} together")
        salt, pin = wanted.get("cache_salt", ""), wanted.get("pin", False)
        if not isinstance(salt, str):
            raise bad_field("cache_salt", "must be a text")
        if not isinstance(pin, bool):
            raise bad_field("pin", "must be true or false")
        bodies: list[dict[str, Any]] = [{"prompt": prompt} for prompt in prompts]
        return cls([*bodies, *({"messages": messages} for messages in chats)], salt, pin)


def _is_prompt(prompt: Any) -> bool:
    if isinstance(prompt, list):
        return bool(prompt) and all(type(token) is int and token >= 0 for token in prompt)
    return isinstance(prompt, str) and bool(prompt)


def _is_chat(messages: Any) -> bool:
    return isinstance(messages, list) and bool(messages) and all(map(_is_message, messages))


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and isinstance(message.get("role"), str)
