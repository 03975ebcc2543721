"""Batches through the gateway and OpenAI's client: run, cancelled, ended, by whom."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import openai
import pytest
from aiohttp import web

from headrace.config.batches import BatchSettings
from headrace.config.gateway import AdmissionSettings
from headrace.config.key_file import hash_of
from headrace.gateway.admission.slo_classes import SloClass
from headrace.gateway.batches import batch_records, line_runs
from tests.unit.batch_fakes import (
    answers,
    batch_state,
    batching,
    echo,
    line,
    lines_of,
    read_lines,
    slow_echo,
    start_batch,
    start_of,
    until_ended,
)
from tests.unit.gateway_fakes import (
    BODY,
    MODEL,
    RESPONSES,
    FakeReplica,
    gateway_of_models,
    soon,
)
from tests.unit.responses_replica import client_of, respond, state_in


async def test_every_line_is_answered_in_the_order_of_the_file(tmp_path: Path) -> None:
    texts = [f"text {number}" for number in range(100)]
    async with batching(tmp_path) as (bench, client):
        made = await start_batch(client, lines_of(texts), metadata={"of": "test"})
        assert (made.status, made.object, made.endpoint) == (
            "validating",
            "batch",
            "/v1/chat/completions",
        )
        done = await until_ended(client, made.id)
        assert (done.status, done.metadata) == ("completed", {"of": "test"})
        counts = done.request_counts
        assert (counts.total, counts.completed, counts.failed) == (100, 100, 0)
        assert done.error_file_id is None
        lines = await read_lines(client, done.output_file_id)
        assert answers(lines) == {str(number): text for number, text in enumerate(texts)}
        assert [each["custom_id"] for each in lines] == [str(number) for number in range(100)]
        assert all(each["response"]["status_code"] == 200 for each in lines)
        await soon(lambda: bench.app.body_reader.held_bytes == 0)


async def test_lines_with_errors_are_in_the_error_file(tmp_path: Path) -> None:
    async with batching(tmp_path) as (_, client):
        made = await start_batch(client, lines_of(["one", "refuse this", "three"]))
        done = await until_ended(client, made.id)
        counts = done.request_counts
        assert (done.status, counts.completed, counts.failed) == ("completed", 2, 1)
        assert answers(await read_lines(client, done.output_file_id)) == {"0": "one", "2": "three"}
        (error,) = await read_lines(client, done.error_file_id)
        assert (error["custom_id"], error["response"]["status_code"]) == ("1", 400)
        assert error["response"]["body"]["error"]["code"] == "refused"


async def test_a_line_is_checked_as_any_request_is(tmp_path: Path) -> None:
    lines = [
        line("stream", "Hi", stream=True),
        line("list", "Hi", tools=[{}] * 20_000),
        line("good", "Hi"),
    ]
    data = b"".join(json.dumps(each).encode() + b"\n" for each in lines)
    async with batching(tmp_path) as (_, client):
        done = await until_ended(client, (await start_batch(client, data)).id)
        errors = {each["custom_id"]: each for each in await read_lines(client, done.error_file_id)}
        assert {name: each["response"]["status_code"] for name, each in errors.items()} == {
            "stream": 400,
            "list": 400,
        }
        assert errors["stream"]["response"]["body"]["error"]["param"] == "stream"
        assert done.request_counts.completed == 1


async def test_a_file_with_faults_fails_the_batch(tmp_path: Path) -> None:
    async with batching(tmp_path) as (bench, client):
        data = lines_of(["a", "b"]) + lines_of(["again"]) + b"no json\n"
        done = await until_ended(client, (await start_batch(client, data)).id)
        assert (done.status, done.request_counts.total) == ("failed", 0)
        assert done.errors is not None and done.errors.data is not None
        assert [(each.line, each.code) for each in done.errors.data] == [
            (3, "duplicate_custom_id"),
            (4, "invalid_json_line"),
        ]
        assert not bench.replica.seen


async def test_a_cancelled_batch_stops_and_has_what_was_answered(tmp_path: Path) -> None:
    go = asyncio.Event()

    async def handler(replica: FakeReplica, request: web.Request) -> web.StreamResponse:
        if len(replica.seen) > 3:
            await go.wait()
        return await echo(replica, request)

    settings = BatchSettings(lines_per_replica=4)
    async with batching(tmp_path, handler, batch_settings=settings) as (bench, client):
        made = await start_batch(client, lines_of(map(str, range(20))))
        await soon(lambda: len(bench.replica.seen) == 7)
        cancelling = await client.batches.cancel(made.id)
        assert cancelling.status == "cancelling" and cancelling.cancelling_at is not None
        done = await until_ended(client, made.id)
        assert (done.status, done.request_counts.completed) == ("cancelled", 3)
        assert bench.replica.aborted == 4
        assert len(answers(await read_lines(client, done.output_file_id))) == 3
        errors = await read_lines(client, done.error_file_id)
        assert len(errors) == 17
        assert {each["error"]["code"] for each in errors} == {"batch_cancelled"}
        with pytest.raises(openai.ConflictError, match="cancelled"):
            await client.batches.cancel(made.id)


async def test_a_batch_expires_with_the_answers_that_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    never = asyncio.Event()
    async with batching(tmp_path, slow_echo(never)) as (bench, client):
        made = await start_batch(client, lines_of(["a", "b"]))
        await soon(lambda: len(bench.replica.seen) == 2)
        monkeypatch.setattr(batch_records, "WINDOW_S", 0)
        done = await until_ended(client, made.id)
        assert (done.status, done.output_file_id) == ("expired", None)
        assert done.expired_at is not None
        errors = await read_lines(client, done.error_file_id)
        assert [each["error"]["code"] for each in errors] == ["batch_expired"] * 2


async def test_a_line_is_sent_again_while_there_is_no_room_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(line_runs, "RETRY_S", 0.01)

    async def busy(replica: FakeReplica, request: web.Request) -> web.StreamResponse:
        if len(replica.seen) < 6:
            return web.json_response({"error": {"message": "later"}}, status=429)
        return await echo(replica, request)

    async with batching(tmp_path, busy) as (_, client):
        done = await until_ended(client, (await start_batch(client, lines_of(["a", "b"]))).id)
        assert done.request_counts.completed == 2


async def test_a_line_that_fails_each_time_has_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(line_runs, "RETRY_S", 0.01)

    async def broken(replica: FakeReplica, request: web.Request) -> web.StreamResponse:
        return web.json_response({"error": {"message": "broken"}}, status=500)

    async with batching(tmp_path, broken) as (bench, client):
        done = await until_ended(client, (await start_batch(client, lines_of(["a"]))).id)
        assert (done.status, done.request_counts.failed) == ("completed", 1)
        assert len(bench.replica.seen) == line_runs.TRIES


async def test_lines_are_taken_back_when_a_request_arrives(tmp_path: Path) -> None:
    """They are run again when it is over, and answered once."""
    go, asked = asyncio.Event(), asyncio.Event()

    async def handler(replica: FakeReplica, request: web.Request) -> web.StreamResponse:
        if b"interactive" in request[BODY]:
            asked.set()
        await go.wait()
        return await echo(replica, request)

    async with batching(tmp_path, handler) as (bench, client):
        made = await start_batch(client, lines_of(map(str, range(8))))
        await soon(lambda: len(bench.replica.seen) == 8)
        message: Any = {"role": "user", "content": "interactive"}
        chat = asyncio.create_task(client.chat.completions.create(model=MODEL, messages=[message]))
        await asked.wait()
        await soon(lambda: bench.replica.aborted == 7)
        go.set()
        assert (await chat).choices[0].message.content == "interactive"
        done = await until_ended(client, made.id)
        lines = await read_lines(client, done.output_file_id)
        assert answers(lines) == {str(number): str(number) for number in range(8)}


async def test_with_admission_lines_have_a_class_that_waits_for_all_others(tmp_path: Path) -> None:
    entered: list[tuple[str, bool]] = []
    async with batching(tmp_path, admission=AdmissionSettings()) as (bench, client):
        await bench.app.start()
        assert bench.app.parts is not None
        (model,) = bench.app.parts.models
        assert model.queue is not None
        enter = model.queue.enter

        async def recorded(tenant: str | None, slo: SloClass, *more: Any) -> Any:
            entered.append((slo.name, slo.background))
            return await enter(tenant, slo, *more)

        model.queue.enter = recorded  # type: ignore[method-assign]
        done = await until_ended(client, (await start_batch(client, lines_of(["a"]))).id)
        assert done.request_counts.completed == 1
    assert entered == [("batch", True)]


async def test_the_status_shows_unfinished_batches(tmp_path: Path) -> None:
    go = asyncio.Event()
    async with batching(tmp_path, slow_echo(go)) as (bench, client):
        made = await start_batch(client, lines_of(["a", "b"]))
        await soon(lambda: len(bench.replica.seen) == 2)
        (told,) = bench.app.state()["batches"]
        assert told == {
            "id": made.id,
            "tenant": None,
            "status": "in_progress",
            "total": 2,
            "completed": 0,
            "failed": 0,
            "in_flight": 2,
        }
        go.set()
        await until_ended(client, made.id)
        await soon(lambda: not bench.app.state()["batches"])


async def test_responses_are_run_and_kept(tmp_path: Path) -> None:
    body = {"model": MODEL, "input": "One"}
    one = {"custom_id": "a", "method": "POST", "url": RESPONSES, "body": body}
    later = {**one, "custom_id": "b", "body": {**body, "background": True}}
    data = b"".join(json.dumps(each).encode() + b"\n" for each in (one, later))
    async with batching(tmp_path, respond, state=state_in(tmp_path)) as (_, client):
        file = await client.files.create(file=("in.jsonl", data), purpose="batch")
        made = await client.batches.create(
            input_file_id=file.id, endpoint=RESPONSES, completion_window="24h"
        )
        done = await until_ended(client, made.id)
        (line,) = await read_lines(client, done.output_file_id)
        response_id = line["response"]["body"]["id"]
        assert (await client.responses.retrieve(response_id)).output_text == "1: One"
        (error,) = await read_lines(client, done.error_file_id)
        assert error["response"]["body"]["error"]["param"] == "background"


# Several models, keys and tenants


async def test_each_line_goes_to_its_own_model(tmp_path: Path) -> None:
    models = ("one", "two", "one", "none")
    lines = [line(f"{n}", "Hi", model=model) for n, model in enumerate(models)]
    data = b"".join(json.dumps(each).encode() + b"\n" for each in lines)
    async with gateway_of_models(
        {"one": [echo], "two": [echo]}, batch_state=batch_state(tmp_path)
    ) as (session, clusters, _):
        url = str(session._base_url).rstrip("/") + "/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none") as client:
            done = await until_ended(client, (await start_batch(client, data)).id)
            assert done.request_counts.completed == 3
            (error,) = await read_lines(client, done.error_file_id)
            assert (error["custom_id"], error["response"]["status_code"]) == ("3", 404)
        seen = {model: len(cluster.members[0].seen) for model, cluster in clusters.items()}
        assert seen == {"one": 2, "two": 1}


def keys_file(folder: Path, **more: Any) -> str:
    file = folder / "keys.yaml"
    entries = [
        {"name": name, "hash": hash_of(f"key-of-{name}".encode()), "tenant": name, **more}
        for name in ("ann", "bob")
    ]
    file.write_text(json.dumps({"keys": entries}))
    return str(file)


async def test_tenants_see_their_own_files_and_batches_only(tmp_path: Path) -> None:
    keys = keys_file(tmp_path)
    async with (
        batching(tmp_path, key="key-of-ann", api_keys_file=keys) as (bench, ann),
        client_of(bench, "key-of-bob") as bob,
    ):
        made = await start_batch(ann, lines_of(["a"]))
        done = await until_ended(ann, made.id)
        assert done.status == "completed"
        assert len((await ann.files.list()).data) == 2 and len((await ann.batches.list()).data) == 1
        assert not (await bob.files.list()).data and not (await bob.batches.list()).data
        for refused in (
            bob.batches.retrieve(made.id),
            bob.batches.cancel(made.id),
            bob.files.retrieve(made.input_file_id),
            bob.files.content(done.output_file_id),
            bob.files.delete(made.input_file_id),
            start_of(bob, made.input_file_id),
        ):
            with pytest.raises(openai.NotFoundError):
                await refused


async def test_a_lines_model_is_checked_by_the_key(tmp_path: Path) -> None:
    keys = keys_file(tmp_path, models=["another"])
    aliases = {"another": {MODEL: 1.0}}
    lines = [line("may", "Hi", model="another"), line("not", "Hi")]
    data = b"".join(json.dumps(each).encode() + b"\n" for each in lines)
    async with batching(tmp_path, key="key-of-ann", api_keys_file=keys, aliases=aliases) as (
        _,
        client,
    ):
        done = await until_ended(client, (await start_batch(client, data)).id)
        (error,) = await read_lines(client, done.error_file_id)
        assert (error["custom_id"], error["response"]["status_code"]) == ("not", 404)
        assert done.request_counts.completed == 1


async def test_a_batch_whose_key_was_removed_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = Path(keys_file(tmp_path))
    never = asyncio.Event()
    async with batching(tmp_path, slow_echo(never), "key-of-ann", api_keys_file=str(keys)) as (
        bench,
        client,
    ):
        made = await start_batch(client, lines_of(["a"]))
        await soon(lambda: len(bench.replica.seen) == 1)
        await bench.app.aclose()
    left = json.loads(keys.read_text())["keys"][1:]
    admin = {"name": "root", "hash": hash_of(b"key-of-root"), "tenant": "ann", "role": "admin"}
    keys.write_text(json.dumps({"keys": [*left, admin]}))
    async with batching(tmp_path, echo, "key-of-root", api_keys_file=str(keys)) as (_, client):
        done = await until_ended(client, made.id)
        assert done.status == "failed" and done.errors is not None and done.errors.data
        assert done.errors.data[0].code == "key_not_accepted"
