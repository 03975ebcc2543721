"""Bodies of requests at the gateway: compressed ones are refused, and JSON is in UTF-8."""

from __future__ import annotations

import gzip
import json

import pytest

from tests.unit.gateway_fakes import BODY, CHAT, PROMPT, answer, gateway_over

JSON = {"content-type": "application/json"}


@pytest.mark.parametrize("encoding", ["identity", "", "Identity, identity"])
async def test_a_body_that_is_not_compressed_is_passed_on(encoding: str) -> None:
    body = json.dumps(PROMPT).encode()
    headers = {**JSON, "content-encoding": encoding}
    async with gateway_over(answer) as bench:
        async with bench.client.post(CHAT, data=body, headers=headers) as response:
            assert response.status == 200, await response.read()
        (seen,) = bench.replica.seen
        assert seen[BODY] == body


@pytest.mark.parametrize(
    "encoding", ["gzip", "x-gzip", "deflate", "br", "gzip, identity", "gzip;q=1"]
)
async def test_a_compressed_body_is_415_and_its_encoding_is_named(encoding: str) -> None:
    headers = {**JSON, "content-encoding": encoding}
    async with (
        gateway_over(answer) as bench,
        bench.client.post(CHAT, data=gzip.compress(b"{}"), headers=headers) as response,
    ):
        assert response.status == 415
        assert response.headers["accept-encoding"] == "identity"
        error = (await response.json())["error"]
        assert error["code"] == "unsupported_content_encoding"
        assert encoding.split(",")[0] in error["message"]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
async def test_a_replica_gets_utf_8_without_a_byte_order_mark(encoding: str) -> None:
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
        json.dumps(PROMPT).encode("utf-16"),
        json.dumps(PROMPT).encode("utf-32"),
        b"{\x00",
        b"\x00",
        b"\xef\xbb\xbf",
        b"\xef\xbb\xbf\xef\xbb\xbf{}",
        b"",
    ],
)
async def test_a_body_that_is_not_utf_8_is_400(body: bytes) -> None:
    async with (
        gateway_over(answer) as bench,
        bench.client.post(CHAT, data=body, headers=JSON) as response,
    ):
        assert response.status == 400
        assert (await response.json())["error"]["code"] == "invalid_json"
