"""Requests that killed their replicas: who is kept in quarantine, for how long, at what cost."""

from __future__ import annotations

import pytest

from headrace.gateway.errors import ApiError
from headrace.gateway.relay import quarantine
from headrace.gateway.relay.quarantine import MAX_REQUESTS, QUARANTINE_S, Quarantine

REQUEST = "/v1/completions", b'{"prompt": "kills"}'


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def time() -> Clock:
    return Clock()


def refuses(held: Quarantine, tenant: str | None, target: str, body: bytes) -> bool:
    try:
        held.check(tenant, target, body)
    except ApiError as error:
        assert (error.status, error.code) == (422, "request_quarantined")
        return True
    return False


def test_a_request_is_refused_to_its_own_tenant_only(time: Clock) -> None:
    held = Quarantine(time)
    held.add("a", *REQUEST)
    assert refuses(held, "a", *REQUEST)
    assert not refuses(held, "b", *REQUEST) and not refuses(held, None, *REQUEST)
    assert not refuses(held, "a", "/v1/chat/completions", REQUEST[1])
    assert not refuses(held, "a", REQUEST[0], REQUEST[1].upper())


def test_a_quarantine_ends_and_leaves_nothing(time: Clock) -> None:
    held = Quarantine(time)
    held.add("a", *REQUEST)
    time.now = QUARANTINE_S / 2
    held.add("a", REQUEST[0], b"other")
    held.add("a", *REQUEST)
    time.now = QUARANTINE_S + 1.0
    assert refuses(held, "a", *REQUEST), "it killed again in between"
    time.now *= 2.0
    assert not refuses(held, "a", *REQUEST)
    assert len(held) == 0 and not held._outlines


def test_a_body_is_hashed_only_where_a_like_one_is_in_quarantine(
    time: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Quarantine(time)
    held.add("a", *REQUEST)

    def hashed(body: bytes) -> bytes:
        raise AssertionError("8 MB of a body would be hashed on the event loop")

    monkeypatch.setattr(quarantine, "_digest", hashed)
    assert not refuses(held, "b", *REQUEST)
    assert not refuses(held, "a", REQUEST[0], b"x" * 8_000_000)
    time.now = QUARANTINE_S
    assert not refuses(held, "a", *REQUEST), "it has expired"


def test_the_oldest_leave_where_there_are_too_many(time: Clock) -> None:
    held = Quarantine(time)
    for number in range(MAX_REQUESTS + 1):
        held.add("a", "/", b"%04d" % number)
    assert len(held) == MAX_REQUESTS
    assert not refuses(held, "a", "/", b"0000") and refuses(held, "a", "/", b"0001")
