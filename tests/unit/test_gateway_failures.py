"""The relay when replicas fail: what is retried, what the client sees."""

from __future__ import annotations

import asyncio
import json

from aiohttp import web

from headrace.gateway.relay.retry import MAX_DELIVERIES
from headrace.observability.gateway_metrics import GatewayMetrics
from headrace.replica_health import PROBE_INTERVAL_S
from tests.unit.gateway_fakes import (
    CHAT,
    EVENTS,
    PROMPT,
    FakeCluster,
    FakeReplica,
    abort_connection,
    answer,
    begin_stream,
    cut,
    free_port,
    gateway_over,
    in_turn,
    soon,
    stall,
    stream,
)

ERROR_EVENT = b'data: {"error":{"message":"EngineDeadError","code":500}}\n\n'


async def die_mid_stream(replica: FakeReplica, request: web.Request) -> web.StreamResponse:
    response = await begin_stream(request)
    await response.write(EVENTS[0] + b'data: {"half')
    await asyncio.sleep(0.05)
    cut(request)
    return response


async def die_before_first_event(replica: FakeReplica, request: web.Request) -> web.StreamResponse:
    response = await begin_stream(request)
    await asyncio.sleep(0.05)
    cut(request)
    return response


async def die_mid_body(replica: FakeReplica, request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"content-type": "application/json"})
    response.content_length = 1000
    await response.prepare(request)
    await response.write(b'{"half":')
    await asyncio.sleep(0.05)
    cut(request)
    return response


async def fail_500(replica: FakeReplica, request: web.Request) -> web.StreamResponse:
    return web.json_response({"error": {"message": "EngineDeadError", "code": 500}}, status=500)


async def fail_in_the_stream(replica: FakeReplica, request: web.Request) -> web.StreamResponse:
    response = await begin_stream(request)
    await response.write(ERROR_EVENT)
    await response.write_eof()
    return response


async def test_a_replica_that_refuses_connections_is_passed_over() -> None:
    async with gateway_over(answer) as bench:
        gone = FakeReplica(answer, "decode-0", port=free_port())
        bench.replica.waiting = 5
        bench.cluster.members.insert(0, gone)
        await soon(lambda: bench.cluster.asked >= 2)
        async with bench.client.post(CHAT, json=PROMPT) as response:
            assert response.status == 200
            assert response.headers["x-headrace-replica"] == "decode-1"


async def test_a_lost_request_goes_to_another_replica() -> None:
    async with gateway_over(abort_connection, answer) as bench:
        bench.cluster.members[1].waiting = 5
        await asyncio.sleep(0.05)
        async with bench.client.post(CHAT, json=PROMPT) as response:
            assert (await response.json())["by"] == "decode-2"
        assert len(bench.cluster.members[0].seen) == 1


async def test_the_only_replica_is_tried_again_when_it_is_back() -> None:
    async with gateway_over(answer) as bench:
        port = bench.replica.port
        await bench.replica.stop()
        task = asyncio.create_task(bench.client.post(CHAT, json=PROMPT))
        await asyncio.sleep(1.5)
        await bench.replica.start(port)
        async with await task as response:
            assert response.status == 200


async def test_waiting_requests_go_to_the_replacement_of_a_dead_replica() -> None:
    async with gateway_over(abort_connection) as bench:
        tasks = [asyncio.create_task(bench.client.post(CHAT, json=PROMPT)) for _ in range(8)]
        await soon(lambda: len(bench.replica.seen) >= 1)
        await bench.replica.stop()
        bench.cluster.members[:] = [await FakeReplica(answer, "decode-2").start()]
        for task in tasks:
            async with await task as response:
                assert (await response.json())["by"] == "decode-2"


async def test_a_failure_asks_for_the_replicas_at_once() -> None:
    async with gateway_over(in_turn(abort_connection, answer)) as bench:
        await soon(lambda: bench.cluster.asked >= 1)
        await asyncio.sleep(0.15)
        asked = bench.cluster.asked
        request = asyncio.create_task(bench.client.post(CHAT, json=PROMPT))
        await soon(lambda: bench.cluster.asked > asked, limit_s=0.5)
        assert (await request).status == 200


async def test_a_stream_that_dies_before_its_first_event_is_retried_unseen() -> None:
    async with (
        gateway_over(in_turn(die_before_first_event, stream)) as bench,
        bench.client.post(CHAT, json=PROMPT) as response,
    ):
        assert await response.read() == b"".join(EVENTS)


async def test_a_whole_answer_that_breaks_off_is_retried_unseen() -> None:
    async with (
        gateway_over(in_turn(die_mid_body, answer)) as bench,
        bench.client.post(CHAT, json=PROMPT) as response,
    ):
        assert (await response.json())["by"] == "decode-1"


async def test_a_stream_that_dies_midway_ends_with_an_error_event_and_without_done() -> None:
    async with gateway_over(die_mid_stream) as bench:
        async with bench.client.post(CHAT, json=PROMPT) as response:
            events = (await response.read()).split(b"\n\n")
        assert events[0] + b"\n\n" == EVENTS[0]
        error = json.loads(events[1].removeprefix(b"data: "))["error"]
        assert (error["type"], error["code"]) == ("server_error", "replica_lost")
        assert events[2:] == [b""]
        assert len(bench.replica.seen) == 1


class Losses(GatewayMetrics):
    def __init__(self) -> None:
        self.when: list[str] = []

    def replica_lost(self, model: str, when: str) -> None:
        self.when.append(when)


async def test_losses_are_counted_by_what_the_client_saw_of_them() -> None:
    losses = Losses()
    handler = in_turn(die_before_first_event, die_mid_stream)
    async with (
        gateway_over(handler, metrics=losses) as bench,
        bench.client.post(CHAT, json=PROMPT) as response,
    ):
        assert b"replica_lost" in await response.read()
    assert losses.when == ["worked", "stream"]


async def test_a_stream_that_dies_after_done_is_whole() -> None:
    async def late(replica: FakeReplica, request: web.Request) -> web.StreamResponse:
        response = await begin_stream(request)
        await response.write(b"".join(EVENTS))
        await asyncio.sleep(0.05)
        cut(request)
        return response

    async with gateway_over(late) as bench, bench.client.post(CHAT, json=PROMPT) as response:
        assert await response.read() == b"".join(EVENTS)


async def test_a_request_that_kills_every_replica_stops_after_a_few() -> None:
    async with gateway_over(*[abort_connection] * (MAX_DELIVERIES + 2)) as bench:
        async with bench.client.post(CHAT, json=PROMPT) as response:
            assert response.status == 502
            assert (await response.json())["error"]["code"] == "replica_lost"
        assert sum(len(member.seen) for member in bench.cluster.members) == MAX_DELIVERIES


async def test_500_of_a_dying_engine_is_retried() -> None:
    async with gateway_over(in_turn(fail_500, answer), answer) as bench:
        for member in bench.cluster.members:
            member.healthy = False
        async with bench.client.post(CHAT, json=PROMPT) as response:
            assert response.status == 200


async def test_a_stream_that_begins_with_a_dying_engines_error_is_retried_unseen() -> None:
    async with gateway_over(in_turn(fail_in_the_stream, stream), stream) as bench:
        for member in bench.cluster.members:
            member.healthy = False
        async with bench.client.post(CHAT, json=PROMPT) as response:
            assert await response.read() == b"".join(EVENTS)


async def test_a_stream_that_begins_with_a_healthy_engines_error_is_the_answer() -> None:
    async with gateway_over(fail_in_the_stream) as bench:
        async with bench.client.post(CHAT, json=PROMPT) as response:
            assert await response.read() == ERROR_EVENT
        assert len(bench.replica.seen) == 1


async def test_a_request_waits_for_the_replacement_of_a_dead_engine() -> None:
    async with gateway_over(fail_500) as bench:
        dead = bench.replica
        dead.healthy = False
        request = asyncio.create_task(bench.client.post(CHAT, json=PROMPT))
        await soon(lambda: len(dead.seen) == 1)
        await asyncio.sleep(3 * PROBE_INTERVAL_S)
        assert len(dead.seen) == 1, "a dead engine was asked again"
        bench.cluster.members[:] = [await FakeReplica(answer, "decode-2").start()]
        async with await request as response:
            assert (await response.json())["by"] == "decode-2"


async def test_500_of_a_healthy_engine_is_the_answer() -> None:
    async with gateway_over(fail_500, answer) as bench:
        bench.cluster.members[1].waiting = 5
        await asyncio.sleep(0.05)
        async with bench.client.post(CHAT, json=PROMPT) as response:
            assert response.status == 500
            assert (await response.json())["error"]["message"] == "EngineDeadError"


async def test_without_a_replica_a_request_waits_for_one() -> None:
    async with gateway_over() as bench:
        task = asyncio.create_task(bench.client.post(CHAT, json=PROMPT))
        await asyncio.sleep(0.3)
        assert not task.done()
        bench.cluster.members.append(await FakeReplica(answer).start())
        assert (await asyncio.wait_for(task, 2)).status == 200


async def test_without_a_replica_in_time_it_is_503_with_retry_after() -> None:
    async with (
        gateway_over(queue_timeout_s=0.3) as bench,
        bench.client.post(CHAT, json=PROMPT) as response,
    ):
        assert response.status == 503
        assert int(response.headers["retry-after"]) >= 1
        assert (await response.json())["error"]["code"] == "no_replica_ready"


async def test_the_wait_for_a_replica_ends_with_the_requests_time() -> None:
    async with (
        gateway_over(request_timeout_s=0.3) as bench,
        bench.client.post(CHAT, json=PROMPT) as response,
    ):
        assert response.status == 504


async def test_a_backend_that_fails_leaves_the_last_known_replicas() -> None:
    class Flaky(FakeCluster):
        async def replicas(self):  # type: ignore[no-untyped-def]
            known = await super().replicas()
            if self.asked > 1:
                raise RuntimeError("no controller")
            return known

    replica = await FakeReplica(answer).start()
    backend = Flaky([replica])
    try:
        async with gateway_over(backend=backend) as bench:
            await soon(lambda: backend.asked > 2)
            async with bench.client.post(CHAT, json=PROMPT) as response:
                assert response.status == 200
    finally:
        await replica.stop()


async def test_a_grammar_that_is_refused_goes_to_no_other_replica() -> None:
    async def refuse(replica: FakeReplica, request: web.Request) -> web.StreamResponse:
        return web.json_response({"error": {"message": "The grammar is refused."}}, status=400)

    async with gateway_over(refuse, refuse) as bench, bench.client.post(CHAT, json=PROMPT) as said:
        assert said.status == 400
        assert sum(len(member.seen) for member in bench.cluster.members) == 1


async def test_a_request_that_holds_its_replica_goes_to_no_other_when_its_time_is_up() -> None:
    async with (
        gateway_over(stall, stall, request_timeout_s=0.3) as bench,
        bench.client.post(CHAT, json=PROMPT) as said,
    ):
        assert said.status == 504
        await asyncio.sleep(0.3)
        assert sum(len(member.seen) for member in bench.cluster.members) == 1
