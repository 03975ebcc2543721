"""Requests about files and batches: kept, listed, deleted, refused."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest

from headrace.config.batches import BatchSettings
from headrace.gateway.kept_records.sqlite_store import SqliteStore
from tests.unit.batch_fakes import (
    batching,
    echo,
    lines_of,
    slow_echo,
    start_batch,
    start_of,
    until_ended,
)
from tests.unit.gateway_fakes import (
    CHAT,
    MODEL,
    gateway_over,
    soon,
)

# Files


async def test_a_file_is_kept_listed_read_and_deleted(tmp_path: Path) -> None:
    data = bytes(range(256)) * 10_000  # some parts
    async with batching(tmp_path) as (bench, client):
        made = await client.files.create(file=("näme.jsonl", data), purpose="batch")
        assert (made.bytes, made.filename, made.purpose) == (len(data), "näme.jsonl", "batch")
        assert made.id.startswith("file-") and made.status == "processed"
        assert (await client.files.retrieve(made.id)) == made
        assert (await client.files.content(made.id)).read() == data
        assert [each.id for each in (await client.files.list(purpose="batch")).data] == [made.id]
        assert not (await client.files.list(purpose="batch_output")).data
        deleted = await client.files.delete(made.id)
        assert deleted.deleted and deleted.id == made.id
        with pytest.raises(openai.NotFoundError):
            await client.files.content(made.id)
        assert not (await client.files.list()).data
        await soon(lambda: bench.app.body_reader.held_bytes == 0)


async def test_the_lifetime_of_a_file_can_be_shortened(tmp_path: Path) -> None:
    async with batching(tmp_path) as (_, client):
        after: Any = {"anchor": "created_at", "seconds": 7200}
        file = await client.files.create(file=("a", b"x"), purpose="batch", expires_after=after)
        assert file.expires_at == file.created_at + 7200
        again: Any = {"anchor": "created_at", "seconds": 1}
        with pytest.raises(openai.BadRequestError, match="expires_after"):
            await client.files.create(file=("a", b"x"), purpose="batch", expires_after=again)


async def test_a_file_that_a_batch_reads_is_not_deleted(tmp_path: Path) -> None:
    go = asyncio.Event()
    async with batching(tmp_path, slow_echo(go)) as (_, client):
        made = await start_batch(client, lines_of(["a"]))
        with pytest.raises(openai.ConflictError, match="unfinished"):
            await client.files.delete(made.input_file_id)
        go.set()
        await until_ended(client, made.id)
        await until_deleted(client, made.input_file_id)


async def until_deleted(client: openai.AsyncOpenAI, file_id: str) -> None:
    """Delete a file as soon as its batch is cleaned up."""
    async with asyncio.timeout(10):
        while True:
            try:
                await client.files.delete(file_id)
                return
            except openai.ConflictError:
                await asyncio.sleep(0.02)


async def test_a_file_beyond_a_limit_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    settings = BatchSettings(max_file_bytes=3_000_000, max_tenant_bytes=4_000_000)
    async with batching(tmp_path, batch_settings=settings) as (bench, client):
        with pytest.raises(openai.APIStatusError, match="max_file_bytes") as caught:
            await client.files.create(file=("a", bytes(3_500_000)), purpose="batch")
        assert caught.value.status_code == 413
        await client.files.create(file=("a", bytes(2_500_000)), purpose="batch")
        with pytest.raises(openai.APIStatusError, match="max_tenant_bytes") as caught:
            await client.files.create(file=("a", bytes(2_500_000)), purpose="batch")
        assert caught.value.status_code == 413
        state = bench.app._batches
        assert state is not None and state._opened is not None
        store = state._opened[0]
        assert isinstance(store, SqliteStore) and store._connection is not None

        def parts() -> int:
            counted = "SELECT count(*) FROM records WHERE name LIKE 'part-%'"
            return int(store._connection.execute(counted).fetchone()[0])  # type: ignore[union-attr]

        await soon(lambda: parts() == 3)


async def test_a_file_may_be_longer_than_other_bodies(tmp_path: Path) -> None:
    async with batching(tmp_path, max_body_bytes=100_000) as (_, client):
        made = await client.files.create(file=("a", bytes(3_000_000)), purpose="batch")
        assert made.bytes == 3_000_000
        with pytest.raises(openai.APIStatusError) as caught:
            message: Any = {"role": "user", "content": "x" * 200_000}
            await client.chat.completions.create(model=MODEL, messages=[message])
        assert caught.value.status_code == 413


async def test_a_tenant_whose_files_fill_its_room_begins_no_batch(tmp_path: Path) -> None:
    settings = BatchSettings(max_tenant_bytes=100_000)
    async with batching(tmp_path, batch_settings=settings) as (_, client):
        file = await client.files.create(file=("a", bytes(100_000)), purpose="batch")
        with pytest.raises(openai.APIStatusError, match="max_tenant_bytes"):
            await start_of(client, file.id)


@pytest.mark.parametrize(
    ("body", "kind", "code"),
    [
        (b"{}", "application/json", "invalid_form"),
        (b"", "multipart/form-data", "invalid_form"),
        (b"--b\r\nno form", "multipart/form-data; boundary=b", "invalid_form"),
        (b"--b\r\n", "multipart/form-data; boundary=" + "b" * 300, "invalid_form"),
        (b"", "multipart/form-data; boundary=b", "invalid_form"),
    ],
)
async def test_what_is_no_form_is_refused(
    tmp_path: Path, body: bytes, kind: str, code: str
) -> None:
    async with (
        batching(tmp_path) as (bench, _),
        bench.client.post("/v1/files", data=body, headers={"content-type": kind}) as answer,
    ):
        assert answer.status == 400
        assert (await answer.json())["error"]["code"] == code


@pytest.mark.parametrize("fields", [{"purpose": "fine-tune"}, {}, {"purpose": "x" * 2000}])
async def test_a_form_with_wrong_fields_is_refused(tmp_path: Path, fields: dict[str, str]) -> None:
    form = aiohttp.FormData()
    form.add_field("file", b"data", filename="a")
    for name, value in fields.items():
        form.add_field(name, value)
    async with batching(tmp_path) as (bench, client):
        async with bench.client.post("/v1/files", data=form) as answer:
            assert answer.status == 400
        assert not (await client.files.list()).data


async def test_a_form_needs_one_file(tmp_path: Path) -> None:
    for files in (0, 2):
        form = aiohttp.FormData({"purpose": "batch"}, default_to_multipart=True)
        for _ in range(files):
            form.add_field("file", b"data", filename="a")
        async with (
            batching(tmp_path) as (bench, _),
            bench.client.post("/v1/files", data=form) as answer,
        ):
            assert answer.status == 400


# Lists and refusals


async def test_batches_are_listed_newest_first_in_pages(tmp_path: Path) -> None:
    async with batching(tmp_path) as (_, client):
        made = [(await start_batch(client, lines_of(["a"]))).id for _ in range(3)]
        listed = await client.batches.list(limit=2)
        assert len(listed.data) == 2 and listed.has_more
        all_of_them = [each.id async for each in client.batches.list(limit=1)]
        assert sorted(all_of_them) == sorted(made)
        with pytest.raises(openai.BadRequestError, match="limit"):
            await client.batches.list(limit=1000)
        for batch_id in made:
            await until_ended(client, batch_id)


async def test_too_many_unfinished_batches_are_refused(tmp_path: Path) -> None:
    go = asyncio.Event()
    settings = BatchSettings(max_unfinished=2)
    async with batching(tmp_path, slow_echo(go), batch_settings=settings) as (_, client):
        made = [await start_batch(client, lines_of(["a"])) for _ in range(2)]
        with pytest.raises(openai.RateLimitError, match="2 batches"):
            await start_batch(client, lines_of(["a"]))
        go.set()
        for each in made:
            await until_ended(client, each.id)


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"endpoint": "/v1/embeddings"}, "endpoint"),
        ({"completion_window": "1h"}, "completion_window"),
        ({"metadata": {"a": "x" * 600}}, "metadata"),
        ({"input_file_id": "file-none"}, "input_file_id"),
    ],
)
async def test_a_wrong_batch_is_refused(tmp_path: Path, change: dict[str, Any], param: str) -> None:
    async with batching(tmp_path) as (_, client):
        file = await client.files.create(file=("a", lines_of(["a"])), purpose="batch")
        wanted = {"input_file_id": file.id, "endpoint": CHAT, "completion_window": "24h", **change}
        with pytest.raises((openai.BadRequestError, openai.NotFoundError)) as caught:
            await client.batches.create(**wanted)
        assert caught.value.param == param


async def test_an_output_file_is_no_input(tmp_path: Path) -> None:
    async with batching(tmp_path) as (_, client):
        done = await until_ended(client, (await start_batch(client, lines_of(["a"]))).id)
        with pytest.raises(openai.BadRequestError, match="purpose"):
            await start_of(client, done.output_file_id)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/files/file-none", 404),
        ("GET", "/v1/files/file-none/content", 404),
        ("GET", "/v1/files/file-none/other", 404),
        ("GET", "/v1/files/a/content/b", 404),
        ("PUT", "/v1/files", 405),
        ("POST", "/v1/files/file-none/content", 405),
        ("GET", "/v1/batches/batch_none", 404),
        ("POST", "/v1/batches/batch_none/cancel", 404),
        ("GET", "/v1/batches/batch_none/cancel", 405),
        ("DELETE", "/v1/batches/batch_none", 405),
        ("GET", "/v1/batches/batch_none/other", 404),
    ],
)
async def test_what_does_not_exist_is_refused(
    tmp_path: Path, method: str, path: str, status: int
) -> None:
    async with batching(tmp_path) as (bench, _), bench.client.request(method, path) as answer:
        assert answer.status == status
        assert "error" in await answer.json()


async def test_without_batches_their_routes_do_not_exist(tmp_path: Path) -> None:
    async with gateway_over(echo) as bench, bench.client.get("/v1/batches") as answer:
        assert answer.status == 404


async def test_a_store_that_cannot_be_used_is_answered_503(tmp_path: Path) -> None:
    file = tmp_path / "no-folder"
    file.write_text("")
    async with batching(file) as (_, client):
        with pytest.raises(openai.InternalServerError) as caught:
            await client.files.create(file=("a", b"x"), purpose="batch")
        assert caught.value.status_code == 503
