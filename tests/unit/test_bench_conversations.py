"""The benchmark of conversation state: what it counts, and what it makes of that."""

from __future__ import annotations

import httpx
import pytest

from benchmarks.conversations.__main__ import Arm, Endpoint, question, ratios


def test_costs_are_parts_of_the_costs_of_sending_all() -> None:
    kept = Arm(5, 1.0, 2.0, [1.0, 3.0], [(10, "a"), (20, "b")])
    whole = Arm(100, 4.0, 8.0, [2.0, 2.0], [(10, "a"), (21, "b")])
    assert ratios(kept, whole) == {
        "turn.bytes_up": 0.05,
        "turn.cpu": 0.25,
        "turn.cpu_gateway": 0.25,
        "turn.cpu_replica": 0.25,
        "turn.s_p50": 1.0,
        "turn.same": 0.5,
    }


def test_only_the_first_turn_has_the_text() -> None:
    assert "text" in question("text", 0) and "text" not in question("text", 1)


def test_a_requests_head_and_body_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    endpoint = Endpoint("http://x", "m")
    request = httpx.Request("POST", "http://x/a?b", headers={"c": "dd"}, content=b"12345")
    endpoint._count(request)
    lines = [b"POST /a?b HTTP/1.1", *(name + b": " + v for name, v in request.headers.raw), b""]
    assert endpoint.sent_bytes == len(b"\r\n".join(lines)) + 2 + len(b"12345")
