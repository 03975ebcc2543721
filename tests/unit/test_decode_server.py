"""What a decode replica does beside answering: probes, orders it was not told, its own count."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from ray.serve._private.common import RUNNING_REQUESTS_KEY
from vllm import SamplingParams

from headrace_decode.apis.prompt_usage import CachedTokens
from headrace_decode.http.internal_port import PLAN
from headrace_decode.llm.engine_request import EngineRequest
from headrace_decode.llm.plan_execution import PlanExecution
from headrace_decode.server import DecodeServer
from headrace_engine.adapters.registry import AdapterVersion
from headrace_engine.adapters.settings import AdapterRef
from headrace_engine.adapters.snapshots import snapshot_root
from headrace_engine.kv_transfer.handoff import (
    PrefillAdapterError,
    PrefillError,
    PrefillRequest,
    PrefillResult,
)
from headrace_engine.serving.settings_override import AppliedOverrides, OverrideStore
from headrace_engine.vllm.llm import lora_request
from headrace_prefill.server import PrefillServer
from tests.support.prefill_executor import RESULT, FakePlan


class Call:
    """Of a handle: answers, or fails."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer
        self.cancelled = 0

    def __await__(self) -> Any:
        yield from ()
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer

    def cancel(self) -> None:
        self.cancelled += 1


class Prefills:
    """The handle of the prefill replicas."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer
        self.asked: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        self.alive = self.prefill = SimpleNamespace(remote=self._remote)

    def _remote(self, *args: Any, **kwargs: Any) -> Call:
        self.asked.append((args, kwargs))
        return Call(self.answer)


@pytest.mark.parametrize(
    ("asked", "answer", "why"),
    [
        ("x", "x", None),
        ("x", "y", "a probe found it not running"),
        ("x", ConnectionError("no"), "a probe found it not running (ConnectionError)"),
        ("", "y", None),
    ],
)
async def test_a_probe_counts_only_if_the_replica_itself_answers(
    asked: str, answer: Any, why: str | None
) -> None:
    server: Any = SimpleNamespace(_prefills=Prefills(answer))
    assert await DecodeServer._probe(server, asked) == why
    assert server._prefills.asked == [((), {"replica": asked})]


async def test_a_prompt_is_sent_to_the_replica_that_the_plan_names_with_the_kind_of_its_kv() -> (
    None
):
    server: Any = SimpleNamespace(_prefills=Prefills("done"), _kv="ab")
    assert await DecodeServer._prefill(server, PrefillRequest("r", b"", replica="y")) == "done"
    asked = PrefillRequest("r", b"", replica="y", kv="ab")
    assert server._prefills.asked == [((asked,), {"replica": "y"})]


async def test_a_prefill_that_ended_before_it_heard_that_nobody_waits_tells_of_its_kv() -> None:
    """Else the KV would be held until its lease ends."""
    ended = asyncio.Event()

    class Late(Call):
        def __await__(self) -> Any:
            yield from ended.wait().__await__()
            return self.answer

    prefills = Prefills("done")
    call = Late("done")
    prefills.prefill = SimpleNamespace(remote=lambda *args, **kwargs: call)
    server: Any = SimpleNamespace(_prefills=prefills, _kv="ab")
    waiting = asyncio.create_task(DecodeServer._prefill(server, PrefillRequest("r", b"")))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.sleep(0)
    assert (call.cancelled, waiting.done()) == (1, False)
    ended.set()
    assert await waiting == "done"


async def test_a_prefill_replica_computes_nothing_that_the_caller_cannot_use() -> None:
    server: Any = SimpleNamespace(_kv="cd", _replica_id="p-2")
    with pytest.raises(PrefillError, match="p-2 has KV of another kind"):
        await PrefillServer.prefill(server, PrefillRequest("r", b"", kv="ab"))


async def test_a_prefill_replica_is_told_which_gateways_plan_it_carries_out() -> None:
    asked: list[PrefillRequest] = []

    async def prefill(request: PrefillRequest) -> PrefillResult:
        asked.append(request)
        return RESULT

    executor: Any = SimpleNamespace(verification=frozenset({"x"}))
    parts: Any = SimpleNamespace(turn=None)
    execution = PlanExecution(executor, prefill, parts, parts)
    prompt = {"prompt_token_ids": [1, 2, 3], "cache_salt": "s"}
    request = EngineRequest(prompt, SamplingParams(), "r", {})
    token = PLAN.set(b"as it came")
    try:
        work = execution.work(request, parts, parts, CachedTokens(None), None)
    finally:
        PLAN.reset(token)
    assert work.plan == b"as it came"
    await work.prefill(FakePlan("prefill", replica="x", plan_id="g-1"))
    [request] = asked
    assert (request.plan_id, request.replica, request.salt) == ("g-1", "x", "s")
    assert request.check, "it has delivered wrong bytes"


async def test_a_prefill_replica_gets_the_adapter_by_its_content() -> None:
    asked: list[PrefillRequest] = []
    failed: list[str] = []
    digest, lora = "0" * 32, AdapterVersion("sql", 7, "0" * 32, "/sql", "")

    async def prefill(request: PrefillRequest) -> PrefillResult:
        asked.append(request)
        raise PrefillAdapterError("p1: sql: /sql cannot be read")

    def ref_of(number: int) -> AdapterRef | None:
        return AdapterRef("sql", digest, "/sql") if number == 7 else None

    adapters: Any = SimpleNamespace(ref_of=ref_of, record_remote_failure=failed.append)
    executor: Any = SimpleNamespace(verification=frozenset())
    parts: Any = SimpleNamespace(turn=None)
    execution = PlanExecution(executor, prefill, parts, parts, lambda: adapters)
    path = str(snapshot_root() / digest)
    options = {"lora_request": lora_request(replace(lora, path=path))}
    prompt = {"prompt_token_ids": [1, 2, 3], "cache_salt": "s"}
    request = EngineRequest(prompt, SamplingParams(), "r", options)
    work = execution.work(request, parts, parts, CachedTokens(None), None)
    assert work.salt not in ("s", "") and digest in work.salt, "plans see another prefix"
    with pytest.raises(PrefillAdapterError):
        await work.prefill(FakePlan("prefill", replica="x"))
    [sent] = asked
    assert (sent.adapter, sent.salt) == (AdapterRef("sql", digest, "/sql"), "s")
    assert failed == [digest]


async def test_orders_in_force_are_carried_out_once() -> None:
    kept: dict[str, bytes] = {}
    told: list[dict[str, Any]] = []

    async def speculation(command: dict[str, Any]) -> None:
        told.append(command)

    server: Any = SimpleNamespace(
        _overrides=OverrideStore("app", kept.get, kept.__setitem__),
        _applied_overrides=AppliedOverrides(),
        _planner=SimpleNamespace(policy="cost"),
        engine=SimpleNamespace(llm=SimpleNamespace(speculation=speculation)),
    )
    server._overrides.set_override({"policy": "local", "mode": "off"})
    for _ in range(2):
        await DecodeServer._apply_overrides(server)
    assert (server._planner.policy, told) == ("local", [{"mode": "off"}])


async def test_a_cluster_that_does_not_answer_changes_no_order() -> None:
    def broken(key: str) -> bytes:
        raise ConnectionError("no GCS")

    server: Any = SimpleNamespace(
        _overrides=OverrideStore("app", broken, lambda key, note: None),
        _applied_overrides=AppliedOverrides(),
    )
    await DecodeServer._apply_overrides(server)


async def test_serve_is_told_the_requests_of_the_own_port() -> None:
    port = SimpleNamespace(count=7)
    planner = SimpleNamespace(demand=lambda: {"came": 3.0})
    server: Any = SimpleNamespace(_port=port, _planner=planner)
    count = DecodeServer.record_autoscaling_stats
    assert await count(server) == {RUNNING_REQUESTS_KEY: 7, "came": 3.0}
