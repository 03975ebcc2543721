"""The gateway's history: its last requests, and its key figures over time."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from headrace.gateway.relay.answer_tokens import MAX_READ_BYTES, answer_tokens
from headrace.gateway.relay.request_history import (
    BIN_RATIO,
    MAX_FINISHED,
    STEPS,
    FinishedRequest,
    RequestHistory,
)
from tests.unit.gateway_fakes import (
    CHAT,
    EVENTS,
    PROMPT,
    FakeReplica,
    answer,
    gateway_over,
    in_turn,
    soon,
)
from tests.unit.test_gateway_stream_resume import WHOLE, tells

DONE = FinishedRequest(
    id="chat-1",
    path=CHAT,
    at=1000.0,
    status=200,
    error=None,
    tenant=None,
    streamed=True,
    replica="decode-1",
    queue_s=0.0,
    ttft_s=0.5,
    total_s=1.5,
    tokens=11,
    resumed=0,
)


class Clock:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.now_s = 50.0

    def __call__(self) -> float:
        return self.now_s


def history(clock: Clock) -> RequestHistory:
    return RequestHistory(clock, unix_s=1000.0)


def test_the_last_requests_are_listed_newest_first_and_older_ones_are_dropped() -> None:
    kept = history(Clock())
    for number in range(MAX_FINISHED + 3):
        kept.record(replace(DONE, id=f"chat-{number}"))
    listed = [each["id"] for each in kept.requests([])["finished"]]
    assert listed == [f"chat-{number}" for number in range(MAX_FINISHED + 2, 2, -1)]


def test_a_request_without_a_valid_key_leaves_no_trace() -> None:
    kept = history(Clock())
    kept.record(replace(DONE, status=401))
    assert not kept.requests([])["finished"] and kept.history()["last"]["requests_per_s"] == 0


@pytest.mark.parametrize(
    ("changed", "failed"),
    [
        ({}, False),
        ({"status": 400, "error": "bad"}, False),
        ({"status": 429, "error": "busy"}, False),
        ({"status": 499}, False),
        ({"status": 503, "error": "no_replica"}, True),
        ({"status": 200, "error": "replica_lost"}, True),
    ],
)
def test_an_error_is_a_fault_of_the_app_not_of_the_client(
    changed: dict[str, object], failed: bool
) -> None:
    kept = history(Clock())
    kept.record(replace(DONE, **changed))  # type: ignore[arg-type]
    assert kept.history()["last"]["error_rate"] == float(failed)


def test_rates_cover_a_minute_or_the_time_since_the_start() -> None:
    clock = Clock()
    kept = history(clock)
    clock.now_s += 20
    kept.record(DONE)
    last = kept.history()["last"]
    assert (last["seconds"], last["requests_per_s"]) == (20.0, 0.05)
    assert last["tokens_per_s"] == pytest.approx(0.55)
    clock.now_s += 45
    assert kept.history()["last"]["requests_per_s"] == pytest.approx(1 / 65, rel=0.01)
    clock.now_s += 30
    last = kept.history()["last"]
    assert (last["requests_per_s"], last["error_rate"], last["ttft_p50_s"]) == (0, None, None)


def test_a_step_without_requests_is_listed_with_zero() -> None:
    clock = Clock()
    kept = history(clock)
    kept.record(DONE)
    clock.now_s += 25
    kept.record(DONE)
    fine, coarse = kept.history()["series"]
    assert fine["at"] == [1000, 1010, 1020] and fine["requests"] == [1, 0, 1]
    assert fine["ttft_p50_s"][1] is None
    assert coarse["at"] == [900] and coarse["requests"] == [2]


def test_series_are_bounded() -> None:
    clock = Clock()
    kept = history(clock)
    for _ in range(3 * 24 * 12 + 5):
        kept.record(DONE)
        clock.now_s += 300
    lengths = [len(series["at"]) for series in kept.history()["series"]]
    assert lengths == [count for _, count in STEPS]


def test_only_streams_have_a_ttft_and_a_time_per_token() -> None:
    kept = history(Clock())
    kept.record(replace(DONE, streamed=False))
    kept.record(replace(DONE, tokens=1, ttft_s=None))
    last = kept.history()["last"]
    assert last["ttft_p50_s"] is None and last["tpot_p50_s"] is None
    kept.record(DONE)
    assert kept.history()["last"]["tpot_p50_s"] == pytest.approx(0.1, rel=BIN_RATIO - 1)


@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=60))
def test_percentiles_are_nearest_rank_within_a_bin(seconds: list[float]) -> None:
    kept = history(Clock())
    for ttft_s in seconds:
        kept.record(replace(DONE, ttft_s=ttft_s, total_s=ttft_s + 1))
    last = kept.history()["last"]
    for share, name in ((0.5, "ttft_p50_s"), (0.99, "ttft_p99_s")):
        exact = sorted(seconds)[math.ceil(share * len(seconds)) - 1]
        assert last[name] == pytest.approx(exact, rel=BIN_RATIO - 1)


@pytest.mark.parametrize(
    ("body", "tokens"),
    [
        (b'{"usage": {"prompt_tokens": 3, "completion_tokens": 7}}', 7),
        (b'{"usage": {"input_tokens": 3, "output_tokens": 5}}', 5),
        (b'{"usage": null}', None),
        (b'{"data": []}', None),
        (b'{"usage": "much"}', None),
        (b"no JSON", None),
        (b'{"usage": {"completion_tokens": 7}}' + b" " * MAX_READ_BYTES, None),
    ],
)
def test_tokens_of_an_answer_that_is_no_stream(body: bytes, tokens: int | None) -> None:
    assert answer_tokens(body) == tokens


async def test_a_resumed_stream_counts_each_token_once() -> None:
    handler = in_turn(tells(*WHOLE[:3], dies=True), tells(*WHOLE))
    async with gateway_over(handler, handler) as bench:
        for each in bench.cluster.members:
            each.healthy = False
        async with bench.client.post(CHAT, json={**PROMPT, "stream": True}) as response:
            assert await response.read() == b"".join(EVENTS)
        async with bench.client.get("/headrace/v1/requests") as response:
            found = await response.json()
        async with bench.client.get("/headrace/v1/history") as response:
            last = (await response.json())["last"]
    (request,) = found["finished"]
    assert (request["tokens"], request["resumed"], request["error"]) == (2, 1, None)
    assert (request["path"], request["status"], request["streamed"]) == (CHAT, 200, True)
    assert last["error_rate"] == 0 and last["ttft_p50_s"] > 0


async def test_requests_in_flight_are_listed_oldest_first() -> None:
    hold = asyncio.Event()

    async def slow(replica: FakeReplica, request: web.Request) -> web.StreamResponse:
        await hold.wait()
        return await answer(replica, request)

    async with gateway_over(slow) as bench:

        async def chat(name: str) -> int:
            headers = {"x-request-id": name}
            async with bench.client.post(CHAT, json=PROMPT, headers=headers) as response:
                return response.status

        calls = []
        for number, name in enumerate(("first", "second"), 1):
            calls.append(asyncio.create_task(chat(name)))
            await soon(lambda number=number: len(bench.replica.seen) == number)  # type: ignore[misc]
        async with bench.client.get("/headrace/v1/requests") as response:
            listed = (await response.json())["in_flight"]
        assert [each["id"] for each in listed] == ["first", "second"]
        assert listed[0]["path"] == CHAT and listed[0]["ttft_s"] is None
        assert listed[0]["age_s"] > listed[1]["age_s"] > 0
        hold.set()
        assert await asyncio.gather(*calls) == [200, 200]
        document = bench.app.requests()
        assert not document["in_flight"] and len(document["finished"]) == 2


async def test_the_gateways_own_documents_and_wrong_paths_are_no_requests() -> None:
    async with gateway_over(answer) as bench:
        for path in ("/version", "/no/such", "/headrace/v1/status"):
            async with bench.client.get(path):
                pass
        async with bench.client.get("/headrace/v1/requests") as response:
            assert (await response.json())["finished"] == []


async def test_requests_and_history_are_an_administrators() -> None:
    async with gateway_over(answer, api_keys=("user",)) as bench:
        for path in ("/headrace/v1/requests", "/headrace/v1/history"):
            headers = {"authorization": "Bearer user"}
            async with bench.client.get(path, headers=headers) as response:
                assert response.status == 403
