"""What the gateway refuses by itself, and how: OpenAI's error shape, at once, without a replica."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
from pydantic import ValidationError

from headrace.config.gateway import AdmissionSettings, GatewaySettings
from headrace.config.key_file import hash_of
from headrace.gateway.body_reader import BodyReader
from headrace.gateway.errors import ApiError
from headrace.gateway.ingress import limits
from headrace.gateway.ingress.api_keys import ApiKeys
from headrace.gateway.ingress.limits import MAX_ITEMS, MAX_OTHER_BYTES
from tests.unit.gateway_fakes import (
    CHAT,
    PROMPT,
    Bench,
    FakeCluster,
    answer,
    gateway_over,
    soon,
    stall,
)

JSON = {"content-type": "application/json"}


async def refused(
    bench: Bench, status: int, method: str = "POST", path: str = CHAT, **kw: Any
) -> dict[str, Any]:
    """The error of a request that must get `status`, in OpenAI's shape."""
    async with bench.client.request(method, path, **kw) as response:
        body = await response.read()
        assert response.status == status, body
        assert response.headers["content-type"] == "application/json"
        assert response.headers["x-request-id"]
        error = json.loads(body)["error"]
        assert set(error) == {"message", "type", "param", "code"}
        return {**error, "headers": response.headers}


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b'{"a": tru}',
        b"[1]",
        b'"text"',
        b'{"prompt": "\xff"}',
        b'{"prompt": "\\ud800"}',
        b'{"temperature": NaN}',
        b'{"temperature": 1e999}',
        b'{"a": ' + b"[" * 100_000,
        b'{"a": 1} trailing',
    ],
)
async def test_a_body_that_is_no_json_object_is_400(body: bytes) -> None:
    async with gateway_over(answer) as bench:
        error = await refused(bench, 400, data=body, headers=JSON)
        assert error["code"] == "invalid_json"
        assert bench.replica.seen == []


async def test_structured_outputs_that_are_no_object_are_400_where_vllm_fails() -> None:
    async with gateway_over(answer) as bench:
        for wrong in ("x", [], 3):
            body = {**PROMPT, "structured_outputs": wrong}
            async with bench.client.post(CHAT, json=body) as response:
                assert response.status == 400
                assert (await response.json())["error"]["param"] == "structured_outputs"


async def test_a_list_that_would_hold_up_a_replica_is_400() -> None:
    async with gateway_over(answer) as bench:
        for field, most in MAX_ITEMS.items():
            for items, status in ((most, 200), (most + 1, 400)):
                body = {**PROMPT, field: ["x"] * items}
                async with bench.client.post(CHAT, json=body) as response:
                    assert response.status == status
                    if status == 400:
                        assert (await response.json())["error"]["param"] == field
        body = {"prompt": [1] * (MAX_ITEMS["prompt"] + 1)}
        async with bench.client.post(CHAT, json=body) as response:
            assert response.status == 200, "the token ids of one prompt"


MANY = 300_000


@pytest.mark.parametrize(
    "value",
    [[{}] * MANY, ["a"] * MANY, {str(n): 0 for n in range(MANY)}, [[]] * MANY, [1] * 4 * MANY],
    ids=["objects", "strings", "names", "lists", "numbers"],
)
def test_a_body_of_very_many_values_is_refused_before_it_is_parsed(value: Any) -> None:
    body = json.dumps({"messages": value}).encode()
    with pytest.raises(ApiError) as refused:
        limits.parse_object(body)
    assert refused.value.code == "too_many_values"


@pytest.mark.parametrize("unit", ['"', "\\", '\\"', "[", "{", ",", '","', '\\",', '"[{,'])
def test_text_that_only_looks_like_many_values_passes(unit: str) -> None:
    body = json.dumps({"prompt": unit * (1_000_000 // len(unit)), "user": "\\"}).encode()
    assert limits.parse_object(body) == json.loads(body)


def test_the_longest_prompt_of_token_ids_passes() -> None:
    limits.parse_object(json.dumps({"prompt": [123_456] * 1_000_000}).encode())


async def test_malformed_json_is_told_with_its_position() -> None:
    async with gateway_over(answer) as bench:
        error = await refused(bench, 400, data=b'{"a": x}', headers=JSON)
        assert "byte 6" in error["message"]
        error = await refused(bench, 400, data=b'{"a": "\xff"}', headers=JSON)
        assert "byte 7" in error["message"]


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", ""])
async def test_a_content_type_other_than_json_is_400_as_with_vllm(kind: str) -> None:
    async with gateway_over(answer) as bench:
        headers = {"content-type": kind}
        error = await refused(bench, 400, data=json.dumps(PROMPT), headers=headers)
        assert error["code"] == "unsupported_media_type"


async def test_a_content_type_may_have_a_charset_and_capitals() -> None:
    async with gateway_over(answer) as bench:
        headers = {"content-type": "Application/JSON; charset=utf-8"}
        async with bench.client.post(CHAT, data=json.dumps(PROMPT), headers=headers) as response:
            assert response.status == 200


async def test_a_body_announced_as_too_long_is_413_before_it_is_read() -> None:
    async with gateway_over(answer, max_body_bytes=1000) as bench:
        reader, writer = await asyncio.open_connection("127.0.0.1", bench.gateway.port)
        head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        writer.write((head + "content-length: 1001\r\n\r\n").encode())
        async with asyncio.timeout(2):
            assert b" 413 " in await reader.readline()
        writer.close()


async def test_a_body_that_grows_too_long_is_413() -> None:
    async def chunks() -> Any:
        for _ in range(20):
            yield b" " * 100

    async with gateway_over(answer, max_body_bytes=1000) as bench:
        error = await refused(bench, 413, data=chunks(), headers=JSON)
        assert error["code"] == "request_too_large"


async def test_a_body_of_just_the_limit_passes() -> None:
    body = json.dumps(PROMPT).encode()
    async with gateway_over(answer, max_body_bytes=len(body)) as bench:
        async with bench.client.post(CHAT, data=body, headers=JSON) as response:
            assert response.status == 200
        await refused(bench, 413, data=body + b" ", headers=JSON)


async def test_a_client_that_is_slow_with_its_body_gets_408() -> None:
    async with gateway_over(answer, body_timeout_s=0.2) as bench:
        reader, writer = await asyncio.open_connection("127.0.0.1", bench.gateway.port)
        head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        writer.write((head + "content-length: 100\r\n\r\n{").encode())
        async with asyncio.timeout(2):
            text = await reader.read()
        assert b" 408 " in text and b"connection: close" in text.lower()
        writer.close()


async def test_a_client_that_leaves_within_its_body_is_forgotten() -> None:
    async with gateway_over(answer, max_concurrent=1) as bench:
        _, writer = await asyncio.open_connection("127.0.0.1", bench.gateway.port)
        head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        writer.write((head + "content-length: 100\r\n\r\n{").encode())
        await asyncio.sleep(0.1)
        await refused(bench, 429, json=PROMPT)
        writer.close()
        await asyncio.sleep(0.1)
        async with bench.client.post(CHAT, json=PROMPT) as response:
            assert response.status == 200


async def test_one_request_too_many_at_once_is_429_with_retry_after() -> None:
    async with gateway_over(stall, max_concurrent=2) as bench:
        tasks = [asyncio.create_task(bench.client.post(CHAT, json=PROMPT)) for _ in range(2)]
        await soon(lambda: len(bench.replica.seen) == 2)
        error = await refused(bench, 429, json=PROMPT)
        assert int(error["headers"]["retry-after"]) >= 1
        assert error["type"] == "rate_limit_error"
        for task in tasks:
            task.cancel()
        await soon(lambda: bench.replica.aborted == 2)


async def test_warming_takes_a_place_like_any_request() -> None:
    async with gateway_over(stall, max_concurrent=1) as bench:
        task = asyncio.create_task(bench.client.post(CHAT, json=PROMPT))
        await soon(lambda: len(bench.replica.seen) == 1)
        await refused(bench, 429, path="/headrace/v1/warm", json={"prompts": ["x"]})
        task.cancel()


async def test_unknown_paths_are_404_and_wrong_methods_405_with_allow() -> None:
    async with gateway_over(answer) as bench:
        await refused(bench, 404, "GET", "/v1/nothing")
        await refused(bench, 404, "POST", "/v1/embeddings", json={})
        error = await refused(bench, 405, "GET", CHAT)
        assert error["headers"]["allow"] == "POST"
        for path in ("/v1/models", "/v1/models/x", "/health", "/metrics"):
            error = await refused(bench, 405, "DELETE", path)
            assert "GET" in error["headers"]["allow"]


async def test_with_keys_all_but_health_needs_one() -> None:
    async with gateway_over(answer, api_keys=("right", "also")) as bench:
        paths = ["/", "/v1/models", "/metrics", "/openapi.json", "/headrace/v1/status", "/nothing"]
        for path in paths:
            error = await refused(bench, 401, "GET", path)
            assert error["code"] == "invalid_api_key"
            assert error["type"] == "invalid_request_error"
        async with bench.client.get("/health") as response:
            assert response.status == 200
        for value in ("", "Bearer", "Bearer wrong", "Basic right", "right", "Bearer right also"):
            await refused(bench, 401, json=PROMPT, headers={"authorization": value})
        for value in ("Bearer right", "bearer also"):
            headers = {"authorization": value}
            async with bench.client.post(CHAT, json=PROMPT, headers=headers) as response:
                assert response.status == 200


async def test_keys_come_from_a_file_too(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    entry = {"name": "a", "hash": hash_of(b"secret-2"), "tenant": "shop"}
    file.write_text(yaml.safe_dump({"keys": [entry]}))
    async with gateway_over(answer, api_keys_file=str(file)) as bench:
        await refused(bench, 401, json=PROMPT, headers={"authorization": f"Bearer {entry['hash']}"})
        headers = {"authorization": "Bearer secret-2"}
        async with bench.client.post(CHAT, json=PROMPT, headers=headers) as response:
            assert response.status == 200
        assert bench.replica.seen[-1].headers["x-headrace-tenant"] == "shop"


async def test_a_client_cannot_say_whose_request_it_is() -> None:
    forged = {"x-headrace-tenant": "shop", "x-headrace-internal": "guess"}
    async with gateway_over(answer, api_keys=("right-key",)) as bench:
        headers = {"authorization": "Bearer right-key", **forged}
        async with bench.client.post(CHAT, json=PROMPT, headers=headers) as response:
            assert response.status == 200
        told = bench.replica.seen[-1].headers.getall("x-headrace-tenant")
        assert told == [f"key-{hash_of(b'right-key')[7:19]}"]
    async with gateway_over(answer) as bench:
        async with bench.client.post(CHAT, json=PROMPT, headers=forged) as response:
            assert response.status == 200
        assert "x-headrace-tenant" not in bench.replica.seen[-1].headers


LIMIT = "x-headrace-max-retention"


@pytest.mark.parametrize(
    ("setting", "own", "told"),
    [
        ({}, None, ["3600"]),
        ({"max_retention_s": 60}, None, ["60"]),
        ({"max_retention_s": 0}, None, []),
        ({}, 86_400, ["86400"]),
        ({}, 5, ["5"]),
        ({}, 0, []),
        ({"max_retention_s": 0}, 60, ["60"]),
    ],
)
async def test_a_replica_is_told_how_long_a_request_may_have_its_kv_retained(
    tmp_path: Path, setting: dict[str, int], own: int | None, told: list[str]
) -> None:
    file = tmp_path / "keys.yaml"
    entry = {"name": "a", "hash": hash_of(b"secret"), "tenant": "shop"}
    limits = {} if own is None else {"max_retention_s": own}
    file.write_text(yaml.safe_dump({"keys": [{**entry, **limits}]}))
    async with gateway_over(answer, api_keys_file=str(file), **setting) as bench:
        headers = {"authorization": "Bearer secret", LIMIT: "86400"}  # which no client may say
        async with bench.client.post(CHAT, json=PROMPT, headers=headers) as response:
            assert response.status == 200
        assert bench.replica.seen[-1].headers.getall(LIMIT, []) == told


async def test_without_keys_the_setting_holds_for_everybody() -> None:
    async with gateway_over(answer, max_retention_s=60) as bench:
        async with bench.client.post(CHAT, json=PROMPT, headers={LIMIT: "86400"}) as response:
            assert response.status == 200
        assert bench.replica.seen[-1].headers.getall(LIMIT) == ["60"]


@pytest.mark.parametrize("seconds", [-1, 86_401, 0.5, "a day"])
def test_a_wrong_limit_is_refused(tmp_path: Path, seconds: object) -> None:
    with pytest.raises(ValidationError, match="max_retention_s"):
        GatewaySettings.model_validate({"max_retention_s": seconds})
    file = tmp_path / "keys.yaml"
    entry = {"name": "a", "hash": hash_of(b"secret"), "tenant": "shop", "max_retention_s": seconds}
    file.write_text(yaml.safe_dump({"keys": [entry]}))
    with pytest.raises(ValueError, match=r"keys\[0\]\.max_retention_s"):
        ApiKeys(file=str(file))


OURS = ("/headrace/v1/status", "/headrace/v1/corpora", "/headrace/v1/plans/known")


async def test_with_keys_only_an_admin_key_administers() -> None:
    admin = {"authorization": "Bearer operator"}
    user = {"authorization": "Bearer right-key"}
    options = {"api_keys": ("right-key",), "admin_key_hash": hash_of(b"operator")}
    async with gateway_over(answer, **options) as bench:
        for path in OURS:
            error = await refused(bench, 403, "GET", path, headers=user)
            assert error["code"] == "admin_only"
        changes = {"/headrace/v1/router": {"policy": "local"}, "/headrace/v1/speculation": {}}
        for path, body in changes.items():
            await refused(bench, 403, "PUT", path, json=body, headers=user)
        prompts = {"prompts": ["x"]}
        await refused(bench, 403, "POST", "/headrace/v1/warm", json=prompts, headers=user)
        async with bench.client.get("/headrace/v1/status", headers=admin) as response:
            assert response.status == 200


@pytest.mark.parametrize("name", ["X-Forwarded-For", "Forwarded", "Via", "X-Real-IP"])
async def test_without_keys_a_request_that_was_forwarded_does_not_administer(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A proxy on this machine connects from loopback, whoever its client is."""
    monkeypatch.setenv("FORWARDED_ALLOW_IPS", "*")
    async with gateway_over(answer) as bench:
        async with bench.client.get("/headrace/v1/status") as response:
            assert response.status == 200
        headers = {name: "127.0.0.1"}
        for path in OURS:
            await refused(bench, 403, "GET", path, headers=headers)


ROOT = {"api_keys": ("right-key",), "admin_key_hash": hash_of(b"operator")}
AS_ROOT = {"authorization": "Bearer operator"}


@pytest.mark.parametrize(("named", "tenant"), [({}, "admin"), ({"tenant": "shop"}, "shop")])
async def test_a_warmed_prompt_is_its_tenants(named: dict[str, str], tenant: str) -> None:
    async with gateway_over(answer, **ROOT) as bench:
        body = {"prompts": ["x"], "cache_salt": "tenant:other:", **named}
        async with bench.client.post("/headrace/v1/warm", json=body, headers=AS_ROOT) as response:
            assert response.status == 200
        ((_, salt, _),) = bench.cluster.warmed
        assert salt == f"tenant:{tenant}:tenant:other:"


async def test_warming_waits_for_admission_prompt_by_prompt() -> None:
    """Each prompt takes a turn in the queue like a client's request."""
    admission = AdmissionSettings(requests_per_replica=1)
    async with gateway_over(stall, **ROOT, admission=admission) as bench:
        held = asyncio.create_task(
            bench.client.post(CHAT, json=PROMPT, headers=AS_ROOT).__aenter__()
        )
        await soon(lambda: bool(bench.replica.seen))
        warming = asyncio.create_task(
            bench.client.post(
                "/headrace/v1/warm", json={"prompts": ["x", "y"]}, headers=AS_ROOT
            ).__aenter__()
        )
        await asyncio.sleep(0.2)
        assert bench.cluster.warmed == []
        held.cancel()
        assert (await warming).status == 200
        assert [body for body, _, _ in bench.cluster.warmed] == [{"prompt": "x"}, {"prompt": "y"}]


async def test_a_client_that_hangs_up_ends_the_warming() -> None:
    class Slow(FakeCluster):
        async def warm(self, body: dict[str, Any], salt: str, pin: bool) -> list[dict[str, Any]]:
            await asyncio.sleep(0.05)
            return await super().warm(body, salt, pin)

    slow = Slow()
    async with gateway_over(answer, backend=slow) as bench:
        warming = asyncio.create_task(
            bench.client.post("/headrace/v1/warm", json={"prompts": ["x"] * 200}).__aenter__()
        )
        await soon(lambda: bool(slow.warmed))
        warming.cancel()
        await asyncio.sleep(0.3)
        done = len(slow.warmed)
        await asyncio.sleep(0.3)
        assert len(slow.warmed) == done < 200


async def test_warming_counts_among_the_requests_under_way() -> None:
    async with gateway_over(stall, max_concurrent=1) as bench:
        held = asyncio.create_task(bench.client.post(CHAT, json=PROMPT).__aenter__())
        await soon(lambda: bool(bench.replica.seen))
        await refused(bench, 429, "POST", "/headrace/v1/warm", json={"prompts": ["x"]})
        held.cancel()


async def test_http_that_is_no_http_is_400_in_the_same_shape() -> None:
    async with gateway_over(answer) as bench:
        reader, writer = await asyncio.open_connection("127.0.0.1", bench.gateway.port)
        writer.write(b"NONSENSE\r\n\r\n")
        async with asyncio.timeout(2):
            head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        assert b" 400 " in head and json.loads(body)["error"]["code"] == "bad_http"
        writer.close()


async def test_two_hundred_bad_requests_leave_a_working_gateway() -> None:
    bodies = [b"", b"{", b"\xff\xfe", b"[]", b'{"a":' * 2000, b" " * 20_000, b"null"]
    async with gateway_over(answer, max_body_bytes=10_000, max_concurrent=8) as bench:

        async def bad(number: int) -> int:
            body = bodies[number % len(bodies)]
            async with (
                aiohttp.ClientSession(bench.url) as client,
                client.post(CHAT, data=body, headers=JSON) as response,
            ):
                await response.read()
                return response.status

        gate = asyncio.Semaphore(8)

        async def one(number: int) -> int:
            async with gate:
                return await bad(number)

        statuses = await asyncio.gather(*map(one, range(200)))
        assert set(statuses) <= {400, 413, 429}
        async with bench.client.post(CHAT, json=PROMPT) as response:
            assert response.status == 200


@pytest.mark.parametrize(
    "other",
    [
        {"stop": ["ab"] * 500_000},
        {"logit_bias": {str(n): 1 for n in range(100_000)}},
        {"user": "x" * MAX_OTHER_BYTES},
        {f"k{n}": n for n in range(60_000)},
    ],
    ids=["stop", "logit_bias", "user", "many"],
)
async def test_bulk_where_no_request_has_any_is_400_before_it_is_parsed(other: Any) -> None:
    async with gateway_over(answer) as bench:
        error = await refused(bench, 400, json={**PROMPT, **other})
        assert error["code"] == "fields_too_large"
        assert bench.replica.seen == []


@pytest.mark.parametrize(
    "bulky",
    ["messages", "prompt", "input", "tools", "documents", "instructions", "state", "images"],
)
async def test_prompts_and_tools_may_have_bulk(bulky: str) -> None:
    async with gateway_over(answer) as bench:
        body = {"model": "m", bulky: "x" * 4 * MAX_OTHER_BYTES}
        async with bench.client.post(CHAT, json=body) as response:
            assert response.status == 200


async def test_long_bodies_are_parsed_one_pass_at_a_time_while_others_have_turns() -> None:
    body_reader = BodyReader(GatewaySettings(), keys_on=False)
    body = json.dumps({"prompt": "x" * 2 * MAX_OTHER_BYTES}).encode()
    parsing = [asyncio.create_task(body_reader.parsed(body)) for _ in range(4)]
    turns = 0
    while not all(task.done() for task in parsing):
        await asyncio.sleep(0)
        turns += 1
        assert sum(task.done() for task in parsing) <= turns // 2
    assert [await task for task in parsing] == [json.loads(body)] * 4


async def test_a_long_body_that_is_wrong_does_not_keep_the_next_one_waiting() -> None:
    body_reader = BodyReader(GatewaySettings(), keys_on=False)
    wrong = json.dumps({"user": "x" * 2 * MAX_OTHER_BYTES}).encode()
    right = json.dumps({"prompt": "x" * 2 * MAX_OTHER_BYTES}).encode()
    with pytest.raises(ApiError):
        await body_reader.parsed(wrong)
    assert await asyncio.wait_for(body_reader.parsed(right), 10.0)
