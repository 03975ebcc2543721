"""Checks of a client's request: content type, size of the body, JSON, and fields.

The body is checked and not changed: the replica gets the client's own bytes.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, TypeVar

import msgspec
import pydantic
from pydantic_core import PydanticCustomError

from headrace.gateway import errors
from headrace.gateway.asgi import ClientGone, Receive
from headrace.gateway.ingress.body_budget import BodyReservation
from headrace_engine.serving.validation import FailFastAdapter

Model = TypeVar("Model", bound=pydantic.BaseModel)

MAX_ITEMS = {
    "messages": 16_384,
    "input": 16_384,
    "items": 16_384,
    "tools": 16_384,
    "prompt": 1_024,
    "tokens": 65_536,
    "images": 64,
    "audio": 64,
    "videos": 64,
}
"""Maximum length of lists in a request's body, by field. vLLM fetches all media of a structured
decision before it checks the model's limit of them."""

MAX_MESSAGE_PARTS = 32_768
"""Maximum number of entries of all lists within a conversation. vLLM takes 21 microseconds for each
part of a message."""
MAX_LOGPROBS = 1 << 20
"""Maximum number of log-probabilities in one answer. A replica holds some 500 bytes for each, and
writes 80."""
DEFAULT_TOKENS = 8_192
"""Assumed number of tokens of an answer without a limit, for `MAX_LOGPROBS`."""
BYTES_PER_TOKEN = 4
MAX_ADMIN_FIELDS = 64
"""Maximum fields of an administrative request; pydantic makes an object of each unknown one."""

MAX_OTHER_BYTES = 512 * 1024
"""Maximum size of all fields of a request but the `_Bulky` ones, together. A schema may have 256
KiB. Parsing 400,000 biases (5 MB) blocked the gateway for 0.1 s and a replica for 0.4 s."""


class _Bulky(msgspec.Struct):
    """The fields that carry prompts, tools, documents and tokens; they stay unparsed, since only
    their sizes are needed."""

    messages: msgspec.Raw = msgspec.Raw(b"")
    prompt: msgspec.Raw = msgspec.Raw(b"")
    prompt_embeds: msgspec.Raw = msgspec.Raw(b"")
    suffix: msgspec.Raw = msgspec.Raw(b"")
    system: msgspec.Raw = msgspec.Raw(b"")
    instructions: msgspec.Raw = msgspec.Raw(b"")
    input: msgspec.Raw = msgspec.Raw(b"")
    tools: msgspec.Raw = msgspec.Raw(b"")
    documents: msgspec.Raw = msgspec.Raw(b"")
    query: msgspec.Raw = msgspec.Raw(b"")
    items: msgspec.Raw = msgspec.Raw(b"")
    tokens: msgspec.Raw = msgspec.Raw(b"")
    state: msgspec.Raw = msgspec.Raw(b"")
    images: msgspec.Raw = msgspec.Raw(b"")
    audio: msgspec.Raw = msgspec.Raw(b"")
    videos: msgspec.Raw = msgspec.Raw(b"")
    generate_response: msgspec.Raw = msgspec.Raw(b"")


MAX_PARTS = 1 << 18
"""Maximum number of strings, lists and objects in one body; there may be four times as many
numbers. Parsing 500,000 empty objects (2 MB) took 0.03 s, so a body of 8 MB could block an event
loop for 0.2 s."""

_REQUEST_ID = re.compile(rb"[A-Za-z0-9_.:-]{1,128}")
_decode_json = msgspec.json.Decoder().decode
_decode_bulky = msgspec.json.Decoder(_Bulky).decode


def request_id_of(header: bytes | None) -> bytes:
    """Return the client's request id if it has only plain characters, otherwise a new one."""
    if header is not None and _REQUEST_ID.fullmatch(header):
        return header
    return uuid.uuid4().hex.encode()


def check_content_type(header: bytes | None) -> None:
    """Refuse a body that is not JSON, with 400 as vLLM's server does.

    Raises:
        ApiError: 400, the content type is not JSON.
    """
    media_type = (header or b"").split(b";", 1)[0].strip().lower()
    if media_type != b"application/json":
        raise errors.ApiError(
            400,
            "Unsupported media type: only 'application/json' is allowed.",
            code="unsupported_media_type",
        )


def check_encoding(headers: Sequence[bytes]) -> None:
    """Refuse a compressed body.

    Args:
        headers: values of the `content-encoding` headers.

    Raises:
        ApiError: 415, the body is compressed.
    """
    header = b", ".join(headers).decode("latin-1")
    if any(name.strip().lower() not in ("", "identity") for name in header.split(",")):
        raise errors.encoding_not_supported(header)


def check_length(header: bytes | None, limit_bytes: int) -> None:
    """Refuse a body that is announced as too long, before any of it is read.

    Raises:
        ApiError: 413, or 400 for a length that is no number.
    """
    if header is None:
        return
    try:
        length = int(header)
    except ValueError:
        raise errors.ApiError(400, "Content-Length is not a number.") from None
    if length > limit_bytes:
        raise errors.body_too_large(limit_bytes)


async def read_body(receive: Receive, limit_bytes: int, reservation: BodyReservation) -> bytes:
    """Read and return the whole request body; `reservation` counts its bytes.

    Raises:
        ApiError: 413 as soon as more than `limit_bytes` arrived, 429 if there is no room.
        ClientGone: the client hung up first.
    """
    parts: list[bytes] = []
    size, more = 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        part, more = message.get("body", b""), message.get("more_body", False)
        size += len(part)
        if size > limit_bytes:
            raise errors.body_too_large(limit_bytes)
        reservation.add(len(part))
        parts.append(part)
    return b"".join(parts) if len(parts) > 1 else bytes(parts[0])


def check_other_bytes(body: bytes) -> None:
    """Refuse a body whose other fields than the `_Bulky` ones are too large, before it is parsed.

    Raises:
        ApiError: 400, the other fields are larger than `MAX_OTHER_BYTES`.
    """
    if len(body) <= MAX_OTHER_BYTES:
        return
    try:
        bulky = _decode_bulky(body)
    except (msgspec.DecodeError, RecursionError):
        return  # `parse_object` reports the error
    other = len(body) - sum(len(memoryview(value)) for value in msgspec.structs.astuple(bulky))
    if other > MAX_OTHER_BYTES:
        known = ", ".join(_Bulky.__struct_fields__)
        raise errors.ApiError(
            400,
            f"All fields but {known} have {other} bytes together; {MAX_OTHER_BYTES} is the limit.",
            code="fields_too_large",
        )


def check_parts(body: bytes) -> None:
    """Refuse a body of very many small values before it is parsed.

    The first count takes 1 ms a megabyte. It may be too high, because strings may contain brackets
    and commas. If it exceeds the limit, strings and the rest are counted apart, which is exact for
    valid JSON.

    Raises:
        ApiError: 400, the body has more than `MAX_PARTS` values.
    """
    if len(body) <= MAX_OTHER_BYTES or _parts(body) <= MAX_PARTS:
        return
    # Without escaped backslashes and quotes, every second part between quotes is a string.
    bare = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    strings = bare.count(b'"') // 2
    if strings <= MAX_PARTS:
        strings += _parts(b"".join(bare.split(b'"')[::2]))
    if strings > MAX_PARTS:
        raise errors.ApiError(
            400,
            f"The request body has more than {MAX_PARTS} values.",
            code="too_many_values",
        )


def _parts(body: bytes) -> int:
    """Return the maximum number of values that a body may have, four numbers counted as one."""
    quotes, numbers = body.count(b'"') // 2, body.count(b",") // 4
    return max(quotes + body.count(b"[") + body.count(b"{"), numbers)


def check_fields(request: Mapping[str, Any]) -> None:
    """Refuse fields that vLLM answers with a 500, and lists that block a replica's event loop.

    vLLM renders messages and decodes token ids on the loop that serves every stream. Scaled from
    longer lists measured on one slow core, lists at these limits block it for 0.25 s (16,384
    messages) and 0.1 s (65,536 token ids). Each of several prompts is a request to the engine.

    Raises:
        ApiError: 400, naming the field.
    """
    if not isinstance(request.get("structured_outputs"), (Mapping, type(None))):
        message = "structured_outputs must be an object."
        raise errors.ApiError(400, message, code="invalid_type", param="structured_outputs")
    for name, maximum in MAX_ITEMS.items():
        value = request.get(name)
        if isinstance(value, list) and len(value) > maximum and not _is_one_prompt(name, value):
            message = f"{name} has {len(value)} items; {maximum} at once is the limit."
            raise errors.ApiError(400, message, code="too_many_items", param=name)
    for name in ("messages", "input"):
        if count_entries(request.get(name)) > MAX_MESSAGE_PARTS:
            message = f"{name} has more than {MAX_MESSAGE_PARTS} items and parts of items."
            raise errors.ApiError(400, message, code="too_many_items", param=name)


def check_logprobs(request: Mapping[str, Any], body_bytes: int) -> None:
    """Refuse a request that may be answered with very many log-probabilities.

    A replica makes several objects for each, and holds all of them until the answer ends.

    Args:
        body_bytes: size of the request, which limits the tokens of its prompt.

    Raises:
        ApiError: 400, the answer could have more than `MAX_LOGPROBS` log-probabilities.
    """
    best = [_count(request.get(name)) for name in ("top_logprobs", "logprobs")]
    of_prompt = _count(request.get("prompt_logprobs"))
    entries = 0
    if any(best):
        choices = max(1, _count(request.get("n"))) * _prompts(request)
        entries = choices * _max_tokens(request) * (max(best) + 1)
        if request.get("echo"):
            of_prompt = max(of_prompt, *best)
    if of_prompt:
        entries += body_bytes // BYTES_PER_TOKEN * (of_prompt + 1)
    if entries > MAX_LOGPROBS:
        raise errors.ApiError(
            400,
            f"The answer could have {entries:,} log-probabilities; {MAX_LOGPROBS:,} is "
            "the limit. Ask for fewer choices, tokens, prompts or log-probabilities of each token.",
            code="too_many_logprobs",
            param="prompt_logprobs" if of_prompt else "top_logprobs",
        )


def _count(value: Any) -> int:
    """Return a field's number, at most a very large one; 0 for a value that the replica refuses or
    ignores."""
    return min(value, 1 << 40) if isinstance(value, int) and value > 0 else 0


def _prompts(request: Mapping[str, Any]) -> int:
    """Return the number of prompts in a request."""
    for name in ("prompt", "messages"):
        value = request.get(name)
        if isinstance(value, list) and value and isinstance(value[0], (str, list)):
            return len(value)
    return 1


def _max_tokens(request: Mapping[str, Any]) -> int:
    names = ("max_completion_tokens", "max_tokens", "max_output_tokens")
    limits = [count for name in names if (count := _count(request.get(name)))]
    return min(limits) if limits else DEFAULT_TOKENS if "prompt" not in request else 16


def count_entries(value: Any, levels: int = 3) -> int:
    """Count the entries of a list and of the lists in it: conversations, messages, their parts."""
    if type(value) is dict:
        return sum([count_entries(one, levels) for one in value.values() if type(one) is list])
    if type(value) is not list:
        return 0
    if levels == 1 or len(value) > MAX_MESSAGE_PARTS:
        return len(value)
    return len(value) + sum(
        [count_entries(one, levels - 1) for one in value if type(one) is not str]
    )


def _is_one_prompt(name: str, value: list[Any]) -> bool:
    """Return whether a list of token ids is one prompt, which the model's context limits."""
    return name == "prompt" and isinstance(value[0], int)


def validated(model: type[Model], wanted: Mapping[str, Any]) -> Model:
    """Return an administrative request's body as its model.

    Raises:
        ApiError: 400, naming the first wrong field.
    """
    if len(wanted) > MAX_ADMIN_FIELDS:
        message = f"The request body has {len(wanted)} fields; {MAX_ADMIN_FIELDS} is the limit."
        raise errors.ApiError(400, message, code="too_many_fields")
    try:
        checked: Model = _validator(model).validate_python(wanted)
        return checked
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
    place = first.get("ctx", {}).get("field") or ".".join(map(str, first["loc"]))
    raise errors.bad_field(place.partition(".")[0], f"({place}): {first['msg']}")


@cache
def _validator(model: type[pydantic.BaseModel]) -> FailFastAdapter:
    return FailFastAdapter(pydantic.TypeAdapter(model))


def wrong_field(field: str, what: str) -> PydanticCustomError:
    """Return the error of a model's validator of several fields, which names the wrong field."""
    return PydanticCustomError("field", "{what}", {"field": field, "what": what})


def parse_object(body: bytes) -> Mapping[str, Any]:
    """Return the body as a JSON object.

    The body must be valid UTF-8 and valid JSON, with no NaN, infinity or lone surrogate.

    Raises:
        ApiError: 400, with the position of the fault if it is known, or for too many values.
    """
    check_parts(body)
    return decode_object(body)


def decode_object(body: bytes) -> Mapping[str, Any]:
    """Run `parse_object` on a body that has passed `check_parts`."""
    try:
        body.decode()
        request = _decode_json(body)
    except UnicodeDecodeError as error:
        fault = f"byte {error.start} is not valid UTF-8"
    except (msgspec.DecodeError, ValueError) as error:
        fault = str(error)
    except RecursionError:
        fault = "it is nested too deep"
    else:
        if isinstance(request, dict):
            return request
        fault = "it is not an object"
    raise errors.not_json(fault)
