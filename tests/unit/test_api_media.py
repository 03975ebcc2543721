"""Names that clients give to their media are a tenant's own, wherever they stand."""

from __future__ import annotations

import io
import json
import uuid
from typing import Any

import pytest
from PIL import Image

from headrace_decode.apis.media import with_scoped_media
from headrace_decode.apis.middleware import ApiMiddleware
from headrace_decode.apis.request_checks import EngineAbilities
from headrace_decode.http.internal_port import TENANT

PART = {"type": "image_url", "image_url": None, "uuid": "logo"}


def names(body: bytes) -> list[str]:
    found: list[str] = []

    def look(value: Any) -> Any:
        if "uuid" in value:
            found.append(value["uuid"])
        return value

    json.loads(body, object_hook=look)
    return found


@pytest.mark.parametrize(
    "request_",
    [
        {"messages": [{"role": "user", "content": [PART]}]},
        {"messages": [[{"role": "user", "content": [PART]}], [{"role": "user", "content": "x"}]]},
        {"messages": [{"role": "tool", "content": [{"type": "tool_result", "content": [PART]}]}]},
        {"input": [{"type": "function_call_output", "output": [PART]}]},
    ],
)
def test_a_name_is_anothers_for_another_tenant(request_: Any) -> None:
    body = json.dumps(request_).encode()
    [ours], [theirs] = names(with_scoped_media(body, "a")), names(with_scoped_media(body, "b"))
    assert ours != theirs != "logo"
    assert ours.endswith("-logo") and names(with_scoped_media(body, "a")) == [ours]


def test_however_the_key_is_written_it_is_found() -> None:
    body = json.dumps({"messages": [{"content": [PART]}]}).replace("uuid", "uu\\u0069d")
    assert names(with_scoped_media(body.encode(), "a"))[0] != "logo"


@pytest.mark.parametrize(
    "body",
    [
        b'{ "messages": [{"role": "user", "content": "uuid"}] }',
        b'{ "metadata": {"uuid": "mine"}, "messages": [] }',
        b'{ "tools": [{"properties": {"uuid": {"type": "string"}}}], "messages": "\\u00e9" }',
        b'{ "messages": [{"uuid": 7}], "prompt": null }',
        b'{"messages": [{"uuid": "a"',
        b'["uuid"]',
        b"",
    ],
)
def test_what_names_no_media_stays_byte_for_byte(body: bytes) -> None:
    assert with_scoped_media(body, "a") == body


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
@pytest.mark.parametrize("tenant", [None, "a"])
async def test_every_route_gets_scoped_names_where_there_are_tenants(
    path: str, tenant: str | None
) -> None:
    body = json.dumps({"messages": [{"role": "user", "content": [PART]}]}).encode()
    got: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        message = await receive()
        got.extend([dict(scope["headers"])[b"content-length"], message["body"]])

    async def receive() -> Any:
        return {"type": "http.request", "body": body}

    async def send(message: Any) -> None:
        raise AssertionError("nothing is sent")

    headers = [(b"content-length", b"%d" % len(body))]
    scope = {"type": "http", "method": "POST", "path": path, "headers": headers}
    before = TENANT.set(tenant)
    try:
        await ApiMiddleware(app, EngineAbilities(), lambda: False)(scope, receive, send)
    finally:
        TENANT.reset(before)
    length, seen = got
    assert length == b"%d" % len(seen)
    assert (seen == body) == (tenant is None)


def test_no_file_holds_a_name_that_vllm_takes() -> None:
    """vLLM asks for a `uuid.UUID` in the picture's EXIF data."""
    tag = Image.ExifTags.Base.ImageID
    exif = Image.Exif()
    exif[tag] = str(uuid.uuid4())
    file = io.BytesIO()
    Image.new("RGB", (2, 2)).save(file, "JPEG", exif=exif)
    kept = Image.open(io.BytesIO(file.getvalue())).getexif()[tag]
    assert isinstance(kept, str) and not isinstance(kept, uuid.UUID)
