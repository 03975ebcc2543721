"""A gateway with a queue: classes, refusals in OpenAI's shape, fair turns, and no cost when off."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import web

from headrace.config.gateway import AdmissionSettings
from headrace.config.key_file import hash_of
from headrace.gateway.admission.admission_queue import AdmissionQueue
from headrace.gateway.admission.fair_queue import QueuedRequest
from headrace.gateway.replica_pool import ReplicaPool
from headrace.router.plan_codec import decode
from headrace_decode.http.internal_port import KEYS_TARGET
from tests.unit.gateway_fakes import (
    BODY,
    CHAT,
    MESSAGES,
    MODEL,
    PROMPT,
    Bench,
    FakeCluster,
    FakeReplica,
    answer,
    gateway_over,
    soon,
)
from tests.unit.test_gateway_placement import App, asked
from tests.unit.test_router_cluster import report

CLASSES = {
    "interactive": {"ttft_target_s": 2.0, "itl_target_s": 0.05},
    "hurried": {"ttft_target_s": 0.2},
    "batch": {"background": True, "max_wait_s": 5.0},
    "patient": {"max_wait_s": 60.0, "priority": 1},
}


def options(**more: Any) -> AdmissionSettings:
    return AdmissionSettings.model_validate({"classes": CLASSES, **more})


class Slow:
    """A replica that answers when it is told to, and notes in which order it was asked."""

    def __init__(self) -> None:
        self.order: list[str] = []
        self.go = asyncio.Semaphore(0)

    async def handle(self, replica: FakeReplica, request: web.Request) -> web.StreamResponse:
        self.order.append(json.loads(request[BODY])["messages"][0]["content"])
        await self.go.acquire()
        return web.json_response({"object": "chat.completion"})


@asynccontextmanager
async def queued(
    replica: Slow, admission: AdmissionSettings, **more: Any
) -> AsyncIterator[tuple[Bench, Any]]:
    async with gateway_over(replica.handle, admission=admission, **more) as bench:
        tasks: list[asyncio.Task[Any]] = []

        def ask(text: str, slo: str | None = None, key: str | None = None) -> asyncio.Task[Any]:
            headers = {} if slo is None else {"x-headrace-slo": slo}
            if key is not None:
                headers["authorization"] = f"Bearer {key}"
            body = {**PROMPT, "messages": [{"role": "user", "content": text}]}

            async def post() -> Any:
                async with bench.client.post(CHAT, json=body, headers=headers) as got:
                    return got.status, got.headers, await got.json()

            tasks.append(asyncio.create_task(post()))
            return tasks[-1]

        try:
            yield bench, ask
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def queue_of(bench: Bench) -> AdmissionQueue:
    assert bench.app.parts is not None
    (model,) = bench.app.parts.models
    assert model.queue is not None
    return model.queue


async def queue_stats(bench: Bench) -> dict[str, Any]:
    status = await (await bench.client.get("/headrace/v1/status")).json()
    return dict(status["gateway"]["queue"])


async def waiting(bench: Bench, number: int) -> None:
    async with asyncio.timeout(3):
        while True:
            queue = await queue_stats(bench)
            if queue["waiting"] + queue["background_waiting"] == number:
                return
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("admission", [None, options()])
async def test_an_unknown_class_is_refused(admission: AdmissionSettings | None) -> None:
    async with gateway_over(answer, admission=admission) as bench:
        got = await bench.client.post(CHAT, json=PROMPT, headers={"x-headrace-slo": "gold"})
        error = (await got.json())["error"]
        assert (got.status, error["code"]) == (400, "unknown_slo_class")
        assert error["param"] == "x-headrace-slo"
        assert not bench.replica.seen


@pytest.mark.parametrize("value", ["gold", 7, ["interactive"]])
async def test_a_class_may_stand_in_the_body_and_is_checked_there(value: object) -> None:
    async with gateway_over(answer, admission=options()) as bench:
        body = {**PROMPT, "vllm_xargs": {"slo": value}}
        got = await bench.client.post(CHAT, json=body)
        assert (got.status, (await got.json())["error"]["param"]) == (400, "vllm_xargs.slo")
        body["vllm_xargs"] = {"slo": "interactive"}
        assert (await bench.client.post(CHAT, json=body)).status == 200


async def test_the_class_goes_to_no_replica() -> None:
    async with gateway_over(answer, admission=options()) as bench:
        await bench.client.post(CHAT, json=PROMPT, headers={"x-headrace-slo": "interactive"})
        assert "x-headrace-slo" not in bench.replica.seen[0].headers


async def test_requests_beyond_a_replica_s_places_wait_for_their_turn() -> None:
    slow = Slow()
    async with queued(slow, options(requests_per_replica=1)) as (bench, ask):
        first = ask("1")
        await soon(lambda: slow.order == ["1"])
        second = ask("2")
        await waiting(bench, 1)
        assert slow.order == ["1"]
        slow.go.release()
        assert (await first)[0] == 200
        await soon(lambda: slow.order == ["1", "2"])
        slow.go.release()
        assert (await second)[0] == 200
        queue = await queue_stats(bench)
        assert (queue["waiting"], queue["admitted"], queue["waited"]) == (0, 2, 1)


async def test_what_would_come_too_late_is_refused_at_once_in_openai_s_shape() -> None:
    slow = Slow()
    async with queued(slow, options(requests_per_replica=1)) as (bench, ask):
        ask("1")
        await soon(lambda: slow.order == ["1"])
        ask("2", "patient"), ask("3", "patient")
        await waiting(bench, 2)
        status, headers, body = await ask("4", "hurried")
        assert slow.order == ["1"], "nobody was waited for"
        assert (status, body["error"]["type"]) == (429, "rate_limit_error")
        assert body["error"]["code"] == "overloaded" and set(body["error"]) == {
            *("message", "type", "param", "code")
        }
        assert 1 <= int(headers["retry-after"]) <= 60
        assert (await queue_stats(bench))["refused"] == 1


async def test_a_refusal_has_the_shape_of_its_api() -> None:
    slow = Slow()
    async with queued(slow, options(requests_per_replica=1, max_waiting=1)) as (bench, ask):
        ask("1")
        await soon(lambda: slow.order == ["1"])
        ask("2", "patient")
        await waiting(bench, 1)
        got = await bench.client.post(MESSAGES, json=PROMPT)
        told = await got.json()
        assert (got.status, told["type"]) == (429, "error")
        assert told["error"]["type"] == "rate_limit_error"


async def test_the_queue_is_bounded() -> None:
    slow = Slow()
    async with queued(slow, options(requests_per_replica=1, max_waiting=2)) as (bench, ask):
        for text in "123":
            ask(text, "patient")
            await soon(lambda: bool(slow.order))
        await waiting(bench, 2)
        status, headers, body = await ask("4", "patient")
        assert (status, body["error"]["code"]) == (429, "overloaded")
        assert "full" in body["error"]["message"] and int(headers["retry-after"]) >= 1


async def test_who_hangs_up_waits_no_more() -> None:
    slow = Slow()
    async with queued(slow, options(requests_per_replica=1)) as (bench, ask):
        ask("1")
        await soon(lambda: slow.order == ["1"])
        gone = ask("2")
        await waiting(bench, 1)
        gone.cancel()
        await waiting(bench, 0)
        slow.go.release()
        assert (await ask_and_go(ask, slow))[0] == 200
        assert slow.order == ["1", "3"]


async def ask_and_go(ask: Any, slow: Slow) -> Any:
    task = ask("3")
    await soon(lambda: slow.order[-1] == "3")
    slow.go.release()
    return await task


async def test_an_admitted_request_that_waits_in_vain_is_given_up() -> None:
    slow = Slow()
    async with queued(slow, options(requests_per_replica=1)) as (bench, ask):
        ask("1")
        await soon(lambda: slow.order == ["1"])
        status, _, body = await ask("2", "hurried")
        assert (status, body["error"]["code"]) == (429, "overloaded")
        assert (await queue_stats(bench))["expired"] == 1


async def test_a_background_request_goes_when_nobody_else_is_there() -> None:
    slow = Slow()
    async with queued(slow, options(requests_per_replica=2)) as (bench, ask):
        ask("1")
        await soon(lambda: slow.order == ["1"])
        await asyncio.sleep(0.1)
        ask("background", "batch")
        await waiting(bench, 1)
        ask("2")
        await soon(lambda: slow.order == ["1", "2"])
        assert (await queue_stats(bench))["background_waiting"] == 1
        slow.go.release()
        slow.go.release()
        await soon(lambda: slow.order[-1] == "background")


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    def entry(name: str, **more: Any) -> dict[str, Any]:
        return {"name": name, "hash": hash_of(f"key-{name}".encode()), "tenant": name, **more}

    file = tmp_path / "keys.yaml"
    keys = [
        entry("heavy"),
        entry("light"),
        entry("held", slo="batch", slo_classes=["batch"]),
        entry("admin", role="admin"),
    ]
    file.write_text(yaml.safe_dump({"keys": keys}))
    return file


async def test_tenants_take_turns(key_file: Path) -> None:
    slow = Slow()
    admission = options(requests_per_replica=1, default_class="patient")
    async with queued(slow, admission, api_keys_file=str(key_file)) as (_bench, ask):
        ask("first", key="key-heavy")
        await soon(lambda: slow.order == ["first"])
        for text in ("h1", "h2", "h3", "h4"):
            ask(text, key="key-heavy")
            await asyncio.sleep(0.02)
        ask("l1", key="key-light")
        await asyncio.sleep(0.02)
        ask("l2", key="key-light")
        await asyncio.sleep(0.05)
        for _ in range(7):
            await asyncio.sleep(0.06)
            slow.go.release()
        await soon(lambda: len(slow.order) == 7)
        assert slow.order.index("l2") <= 4


async def test_a_key_has_a_class_and_may_be_held_to_it(key_file: Path) -> None:
    slow = Slow()
    async with queued(slow, options(), api_keys_file=str(key_file)) as (_bench, ask):
        status, _, body = await ask("1", "interactive", key="key-held")
        assert (status, body["error"]["code"]) == (400, "unknown_slo_class")
        assert "batch" in body["error"]["message"] and "hurried" not in body["error"]["message"]


async def test_a_key_with_a_class_that_there_is_not_stops_the_start(key_file: Path) -> None:
    with pytest.raises(ValueError, match="'held' has the SLO class 'batch'"):
        async with gateway_over(answer, admission=AdmissionSettings(), api_keys_file=str(key_file)):
            pass


async def test_a_plan_tells_the_queue_what_a_prompt_takes() -> None:
    app = App()
    async with gateway_over(
        *[app.handle] * app.count, make_placer=app.make, admission=options()
    ) as bench:
        await bench.client.get("/v1/models")
        for _ in range(3):
            app.tell()
            assert (await bench.client.post(CHAT, json=PROMPT)).status == 200
        queue = await queue_stats(bench)
        assert (queue["priced"], queue["admitted"], queue["engines"]) == (True, 3, 2)
        assert queue_of(bench).controller.costs.predict("", 1000, 1.0).prefill_s > 0.1
        assert bench.app.charged_s[MODEL][""] > 0.0


async def test_plans_are_made_by_the_targets_of_a_request_s_class() -> None:
    app = App()
    admission = AdmissionSettings.model_validate({"classes": {"at-once": {"ttft_target_s": 1e-6}}})
    async with gateway_over(
        *[app.handle] * app.count, make_placer=app.make, admission=admission
    ) as bench:
        await bench.client.get("/v1/models")
        for slo in (None, "at-once"):
            app.tell()
            headers = {} if slo is None else {"x-headrace-slo": slo}
            assert (await bench.client.post(CHAT, json=PROMPT, headers=headers)).status == 200
        members = bench.cluster.members
        requests = [each for member in members for each in asked(member)]
        plans = [decode(each.headers["x-headrace-plan"].encode()) for each in requests]
        broken = [plan.broken for plan in plans if plan.broken]
        assert broken == [("breaks the TTFT target",)]


async def test_engines_that_are_busy_for_long_make_requests_wait_and_then_be_refused() -> None:
    app = App()
    async with gateway_over(
        *[app.handle] * app.count, make_placer=app.make, admission=options()
    ) as bench:
        await bench.client.get("/v1/models")
        assert app.placer is not None
        for name in app.names():
            busy = report(name, seq=5, prompts=9, queued_tokens=200_000, queued_pairs=10**9)
            app.placer.cluster.report(busy, app.placer.clock())
        await asyncio.sleep(0.06)
        for _ in range(2):
            got = await bench.client.post(CHAT, json=PROMPT, headers={"x-headrace-slo": "hurried"})
        assert (got.status, int(got.headers["retry-after"]) >= 1) == (429, True)
        assert (await queue_stats(bench))["open"] is False


class LongAndShort(App):
    """Replicas that name a prompt of many tokens for a body with "long", else a short one."""

    def __init__(self) -> None:
        super().__init__()
        self.order: list[str] = []

    async def handle(self, replica: FakeReplica, request: web.Request) -> web.StreamResponse:
        if request.path not in (KEYS_TARGET, CHAT):
            return await super().handle(replica, request)
        body = json.loads(request[BODY])
        if request.path == KEYS_TARGET:
            is_long = "long" in body["body"]["messages"][0]["content"]
            return web.json_response({"keys": "", "prompt_tokens": 20_000 if is_long else 100})
        self.order.append(body["messages"][0]["content"])
        return await super().handle(replica, request)


async def test_a_short_prompt_passes_a_long_one_that_waits_and_each_is_read_once() -> None:
    app = LongAndShort()
    async with gateway_over(
        *[app.handle] * app.count, make_placer=app.make, admission=options()
    ) as bench:
        await bench.client.get("/v1/models")
        assert app.placer is not None
        cluster = app.placer.cluster
        for name in app.names():
            busy = report(name, seq=5, prompts=9, queued_tokens=200_000, queued_pairs=10**9)
            cluster.report(busy, app.placer.clock())
        await asyncio.sleep(0.06)

        async def ask(text: str) -> None:
            body = {**PROMPT, "messages": [{"role": "user", "content": text}]}
            assert (await bench.client.post(CHAT, json=body)).status == 200

        async with asyncio.TaskGroup() as group:
            for number, text in enumerate(("1 long", "2 brief")):
                group.create_task(ask(text))
                await waiting(bench, number + 1)
            members = bench.cluster.members
            await soon(lambda: sum(len(asked(each, KEYS_TARGET)) for each in members) == 2)
            await asyncio.sleep(0.05)
            for name in app.names():
                cluster.report(report(name, seq=6), app.placer.clock())
        assert app.order == ["2 brief", "1 long"]
        assert sum(len(asked(each, KEYS_TARGET)) for each in members) == 2


async def test_what_other_gateways_sent_is_charged_as_far_as_it_is_new() -> None:
    queue = AdmissionQueue(options(), ReplicaPool(FakeCluster()), None, one_tenant=False)
    front = queue.controller._foreground
    (
        front.push(QueuedRequest("a", 1.0)),
        front.push(QueuedRequest("b", 1.0)),
        front.push(QueuedRequest("a", 1.0)),
    )
    queue.on_peer_usage({"g2": {"a": 100.0}})
    queue.on_peer_usage({"g2": {"a": 105.0, "b": float("nan")}})
    assert [front.pop().tenant for _ in range(2)] == ["b", "a"]
    queue.on_peer_usage({"g2": {"a": 2.0}})  # started anew
    assert front.pop().tenant == "a"


async def test_gateways_ask_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.gateway.admission.admission_queue.PEER_POLL_INTERVAL_S", 0.01)
    async with gateway_over(answer, admission=options()) as bench:
        bench.cluster.elsewhere = {"g2": {"a": 1.0}}
        await bench.client.get("/health")
        await soon(lambda: queue_of(bench)._usage_of_peers == {"g2": {"a": 1.0}})


async def test_health_and_administration_never_wait() -> None:
    slow = Slow()
    async with queued(slow, options(requests_per_replica=1, max_waiting=1)) as (bench, ask):
        ask("1"), ask("2")
        await waiting(bench, 1)
        for path in ("/health", "/headrace/v1/status", "/version"):
            async with asyncio.timeout(1):
                assert (await bench.client.get(path)).status == 200
