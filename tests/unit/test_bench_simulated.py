"""The requests that the app and the simulator both play."""

import asyncio
import json
import time

import aiohttp
import numpy as np
import pytest
from aiohttp import web

from benchmarks.simulated import work
from headrace_lab.simulate.trace import parse_trace
from tests.unit.test_bench_load import DONE, event, server, streams, usage


def lines(count: int) -> list[str]:
    """Conversations of two turns: the second prompt is the first one and 4,096 tokens more."""
    out = []
    for n in range(count):
        ids = [0, *range(100 * (n // 2) + 1, 100 * (n // 2) + 8 * (1 + n % 2))]
        told = {"timestamp": 1000 * n, "input_length": 512 * len(ids) + 100}
        out.append(json.dumps(told | {"output_length": 1 + 20 * n, "hash_ids": [*ids, 10**6 + n]}))
    return out


def test_prompts_are_shorter_by_the_scale_and_share_what_they_shared() -> None:
    requests = work.scaled(parse_trace(lines(20)), 10, 30.0, 0, 1.0, 16)
    assert (requests.at_s[0], requests.at_s[-1]) == (0.0, pytest.approx(30.0))
    assert [len(prompt) for prompt in requests.prompts[:2]] == [263, 519]
    assert requests.prompts[0][:256].tolist() == requests.prompts[1][:256].tolist()
    assert requests.prompts[0][256:263].tolist() != requests.prompts[1][256:263].tolist()
    assert min(prompt.min() for prompt in requests.prompts) >= work.FIRST_TOKEN_ID
    assert requests.answers[:3] == [1, 1, 2]


def test_another_number_is_another_part_with_other_tokens() -> None:
    trace = parse_trace(lines(40))
    first, second = (work.scaled(trace, 10, 30.0, n, 1.0, 16) for n in (0, 1))
    assert second.answers[0] > first.answers[-1]
    assert not np.isin(first.prompts[0][:32], second.prompts[0][:32]).all()
    with pytest.raises(ValueError, match="40 such requests"):
        work.scaled(trace, 10, 30.0, 4, 1.0, 16)


def test_the_simulator_gets_the_same_requests_and_shared_blocks() -> None:
    requests = work.scaled(parse_trace(lines(20)), 10, 30.0, 0, 1.0, 16)
    played = requests.workload(128)
    trace = played.trace
    assert played.arrival_s.tolist() == requests.at_s
    assert trace.prompt.tolist() == [len(prompt) for prompt in requests.prompts]
    assert trace.output.tolist() == requests.answers
    assert np.diff(trace.starts)[:2].tolist() == [2, 4]
    assert trace.keys[:2].tolist() == trace.keys[2:4].tolist()
    assert (trace.block_tokens, played.keys) == (128, trace.distinct)


async def test_completions_are_asked_for_at_their_times_and_timed_by_the_client() -> None:
    def chunk(text: str) -> bytes:
        return event(choices=[{"index": 0, "text": text}])

    seen: list[dict[str, object]] = []
    handler = streams(chunk(""), chunk("a"), usage(2), DONE, seen=seen)
    prompts = [np.arange(3, dtype=np.uint32), np.arange(5, dtype=np.uint32)]
    requests = work.Requests([0.0, 0.2], prompts, [2, 2])
    async with (
        server(handler, "/v1/completions") as url,
        aiohttp.ClientSession(url) as session,
    ):
        began = time.perf_counter()
        samples = await work.open_loop(session, "m", requests)
    assert time.perf_counter() - began >= 0.2
    assert [body["prompt"] for body in seen] == [[0, 1, 2], [0, 1, 2, 3, 4]]
    assert all(sample.error is None and len(sample.arrivals_s) == 2 for sample in samples)


async def test_a_server_that_refuses_is_a_failed_sample() -> None:
    async def refuse(request: web.Request) -> web.Response:
        await asyncio.sleep(0)
        return web.Response(status=503, text="busy")

    requests = work.Requests([0.0], [np.arange(3, dtype=np.uint32)], [2])
    async with server(refuse, "/v1/completions") as url, aiohttp.ClientSession(url) as session:
        (sample,) = await work.open_loop(session, "m", requests)
    assert sample.error == "HTTP 503: busy"
