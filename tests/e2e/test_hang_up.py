"""A client that hangs up frees its engine work and its KV, whichever way it was prefilled."""

from __future__ import annotations

import uuid
from typing import Any

import httpx
import pytest

from tests.support.app import MODEL, App, until
from tests.support.prompts import noise

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("same_replicas")]

PROMPT_TOKENS = 3000
STEP_S = 10.0
"""An engine step cannot be interrupted; it computes `STEP_TOKENS` at most."""


def request(prompt_tokens: int, seed: int, **fields: Any) -> dict[str, Any]:
    return {
        "model": MODEL,
        "prompt": noise(prompt_tokens, seed),
        "max_tokens": 2000,
        "ignore_eos": True,
        "cache_salt": uuid.uuid4().hex,
        **fields,
    }


@pytest.mark.parametrize("way", ["local", "remote"])
def test_in_the_middle_of_a_stream(app: App, way: str) -> None:
    body = request(300, 1, stream=True)
    with app.policy(way), app.client.stream("POST", "/v1/completions", json=body) as stream:
        events = (line for line in stream.iter_lines() if line.startswith("data: "))
        for _ in range(5):
            next(events)
        until(lambda: app.replica("decode")["running"] == 1, 5, "the request runs")
    app.wait_idle(limit_s=5)


@pytest.mark.parametrize("way", ["local", "remote"])
@pytest.mark.parametrize("stream", [False, True])
def test_before_the_first_token(app: App, way: str, stream: bool) -> None:
    role = "decode" if way == "local" else "prefill"
    body = request(PROMPT_TOKENS, 2, stream=stream)
    before = app.replica(role)
    with (
        app.policy(way),
        pytest.raises(httpx.ReadTimeout),
        app.client.stream("POST", "/v1/completions", json=body, timeout=1.5) as response,
    ):
        response.read()
    until(lambda: app.replica(role)["steps"] > before["steps"], 2 * STEP_S, "the step at work ends")
    app.wait_idle(limit_s=STEP_S)
    after = app.replica(role)
    computed = after["prompt_tokens_computed"] - before["prompt_tokens_computed"]
    assert computed < PROMPT_TOKENS, f"{role} computed all of a prompt that nobody waits for"


def test_while_an_answer_in_one_piece_is_made(app: App) -> None:
    body = request(20, 3)
    with pytest.raises(httpx.ReadTimeout):
        app.client.post("/v1/completions", json=body, timeout=1.5)
    app.wait_idle(limit_s=5)


def test_many_at_once(app: App) -> None:
    for way in ("local", "remote"):
        with app.policy(way):
            streams = []
            for seed in range(8):
                body = request(40, 100 + seed, stream=True)
                built = app.client.build_request("POST", "/v1/completions", json=body)
                streams.append(app.client.send(built, stream=True))
            for stream in streams:
                next(stream.iter_bytes())
            for stream in streams:
                stream.close()
        app.wait_idle(limit_s=10)
