"""Bodies of requests at the gateway: compressed ones, and the encodings of JSON."""

from __future__ import annotations

import asyncio
import gzip
import json
import time
import zlib
from typing import Any

import pytest

from tests.unit.gateway_fakes import BODY, CHAT, PROMPT, Bench, answer, gateway_over, soon

JSON = {"content-type": "application/json"}


# Compressed bodies.


@pytest.mark.parametrize(
    "encoding, encode",
    [
        ("gzip", gzip.compress),
        ("x-gzip", gzip.compress),
        ("GZIP", gzip.compress),
        ("deflate", zlib.compress),
        ("identity", bytes),
        ("", bytes),
        ("gzip, identity", gzip.compress),
        ("gzip", lambda body: gzip.compress(body[:30]) + gzip.compress(body[30:])),
    ],
)
async def test_a_compressed_body_is_decoded(encoding: str, encode: Any) -> None:
    body = json.dumps({**PROMPT, "user": "x" * 400_000}).encode()
    headers = {**JSON, "content-encoding": encoding}
    async with gateway_over(answer) as bench:
        async with bench.client.post(CHAT, data=encode(body), headers=headers) as response:
            assert response.status == 200, await response.read()
        (seen,) = bench.replica.seen
        assert seen[BODY] == body
        assert "content-encoding" not in seen.headers


@pytest.mark.parametrize("encoding", ["br", "zstd", "compress", "gzip, gzip", "gzip;q=1", "\xfc"])
async def test_an_unknown_encoding_is_415_and_named(encoding: str) -> None:
    headers = {**JSON, "content-encoding": encoding}
    async with (
        gateway_over(answer) as bench,
        bench.client.post(CHAT, data=b"{}", headers=headers) as response,
    ):
        assert response.status == 415
        assert response.headers["accept-encoding"] == "gzip, deflate"
        error = (await response.json())["error"]
        assert error["code"] == "unsupported_content_encoding"


@pytest.mark.parametrize(
    "wrong",
    [
        b"no gzip",
        gzip.compress(b"{}" * 1000)[:-9],
        gzip.compress(b"{}") + b"trash",
        gzip.compress(b"") * 1000,
        b"",
    ],
    ids=["plain", "cut", "more", "many", "empty"],
)
async def test_a_body_that_is_not_what_its_encoding_says_is_400(wrong: bytes) -> None:
    headers = {**JSON, "content-encoding": "gzip"}
    async with (
        gateway_over(answer) as bench,
        bench.client.post(CHAT, data=wrong, headers=headers) as response,
    ):
        assert response.status == 400
        assert (await response.json())["error"]["code"] == "invalid_content_encoding"


async def test_a_bomb_is_413_and_holds_no_more_than_a_body() -> None:
    bomb = gzip.compress(b" " * 300_000_000, 9)
    headers = {**JSON, "content-encoding": "gzip"}
    turns: list[float] = []

    async def ticks() -> None:
        last = time.thread_time()
        while True:
            await asyncio.sleep(0)
            turns.append(time.thread_time() - last)
            last = time.thread_time()

    async with gateway_over(answer, max_body_bytes=8_000_000) as bench:
        ticking = asyncio.create_task(ticks())
        async with bench.client.post(CHAT, data=bomb, headers=headers) as response:
            assert response.status == 413
        ticking.cancel()
        assert max(turns) < 0.1, "seconds of a core in one turn of the loop"
        await nothing_is_held_by_bodies(bench)


async def nothing_is_held_by_bodies(bench: Bench) -> None:
    await soon(lambda: bench.app.body_reader.held_bytes == 0)


# Encodings of JSON.


@pytest.mark.parametrize(
    "encoding",
    ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be"],
)
async def test_a_body_may_come_in_any_encoding_that_vllm_takes(encoding: str) -> None:
    asked = {**PROMPT, "user": "h\xe4 \u4f60 \U0001f600"}
    body = json.dumps(asked, ensure_ascii=False).encode(encoding)
    async with gateway_over(answer) as bench:
        async with bench.client.post(CHAT, data=body, headers=JSON) as response:
            assert response.status == 200, await response.read()
        (seen,) = bench.replica.seen
        assert seen[BODY] == json.dumps(asked, ensure_ascii=False).encode()
        assert seen.headers["content-length"] == str(len(seen[BODY]))


@pytest.mark.parametrize(
    "body",
    [
        b"\xff\xfe{",
        b"\xfe\xff\x00{\xd8\x00",
        b"\xff\xfe\x00\x00{",
        b"{\x00",
        b"\x00",
        b"\xef\xbb\xbf",
        b"\xef\xbb\xbf\xef\xbb\xbf{}",
        b"",
    ],
)
async def test_a_body_that_is_in_no_encoding_of_json_is_400(body: bytes) -> None:
    async with (
        gateway_over(answer) as bench,
        bench.client.post(CHAT, data=body, headers=JSON) as response,
    ):
        assert response.status == 400
        assert (await response.json())["error"]["code"] == "invalid_json"


async def test_a_body_that_becomes_too_large_in_utf_8_is_413() -> None:
    body = json.dumps({**PROMPT, "user": "\u4f60" * 3000}, ensure_ascii=False).encode("utf-16")
    async with (
        gateway_over(answer, max_body_bytes=len(body) + 100) as bench,
        bench.client.post(CHAT, data=body, headers=JSON) as response,
    ):
        assert response.status == 413
