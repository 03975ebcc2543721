"""Sending to a client from outside a task."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from headrace.gateway.asgi import TAKES_AT_ONCE, send_at_once, takes_at_once


def test_a_server_without_the_extension_may_wait() -> None:
    assert not takes_at_once({"type": "http"})()
    assert not takes_at_once({"type": "http", "extensions": {"http.response.push": {}}})()


def test_a_server_with_the_extension_says_whether_it_waits() -> None:
    answers = [True, False]
    told = takes_at_once({"extensions": {TAKES_AT_ONCE: lambda: answers.pop(0)}})
    assert (told(), told()) == (True, False)


def test_what_is_sent_at_once_is_sent_when_the_call_returns() -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    send_at_once(send, {"body": b"a"})
    assert sent == [{"body": b"a"}]


def test_what_send_raises_is_raised() -> None:
    async def send(message: Any) -> None:
        raise KeyError("a")

    with pytest.raises(KeyError):
        send_at_once(send, {})


async def test_a_send_that_waits_all_the_same_is_an_error_and_not_left_half_done() -> None:
    ended = []

    async def send(message: Any) -> None:
        try:
            await asyncio.sleep(1)
        finally:
            ended.append(True)

    with pytest.raises(RuntimeError):
        send_at_once(send, {})
    assert ended
