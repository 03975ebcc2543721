"""Greedy answers of an app, by a chosen way of prefill."""

from __future__ import annotations

import time
import uuid
from typing import Any

import pytest

from tests.support.app import App
from tests.support.prompts import ANSWER_TOKENS

TRIES = 10


def answer(app: App, prompt: list[int], salt: str, request_id: str | None = None) -> dict[str, Any]:
    """The first choice's token ids and the request's usage."""
    headers = {"X-Request-Id": request_id} if request_id else None
    body = app.complete(
        prompt,
        headers=headers,
        max_tokens=ANSWER_TOKENS,
        cache_salt=salt,
        return_token_ids=True,
    )
    return {"tokens": body["choices"][0]["token_ids"], "usage": body["usage"]}


def answer_by(app: App, way: str, prompt: list[int], asked: list[int] | None = None) -> list[int]:
    """Token ids, from a request that was really prefilled that way. `asked` gets the length of each
    prompt sent, those that went another way included.

    On a machine that is busy with something else a remote prefill may be late, and the router then
    sends this request and the next ones elsewhere: they are asked again.
    """
    for _ in range(TRIES):
        name = uuid.uuid4().hex
        tokens = answer(app, prompt, name, name)["tokens"]
        if asked is not None:
            asked.append(len(prompt))
        if app.plan(name)["kind"] == way:
            return list(tokens)
        time.sleep(2)
    pytest.fail(f"{TRIES} requests of {len(prompt)} tokens went another way than {way}")
