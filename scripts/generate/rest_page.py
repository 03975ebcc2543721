"""Makes the page docs/rest.md from the OpenAPI document, so that the two cannot differ."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from headrace.config.gateway import GatewaySettings
from headrace.gateway.ingress.limits import (
    DEFAULT_TOKENS,
    MAX_ITEMS,
    MAX_LOGPROBS,
    MAX_MESSAGE_PARTS,
)
from headrace.gateway.openapi import openapi_document, own_operations
from headrace.gateway.relay.retry import MAX_ERROR_BYTES

PLAINER = {"What the questions are about: text or JSON.": "Subject of the questions: text or JSON."}
"""Plainer words for descriptions of vLLM's."""
INTRODUCTION = """\
<!-- Written by `python -m scripts.generate`; change scripts/generate/rest_page.py. -->
# REST reference

The gateway answers at `http://HOST:PORT` (`gateway.host`, `gateway.port`; `127.0.0.1:8000` on a
laptop). A running app publishes this reference as an OpenAPI 3.1 document at `/openapi.json`.

## How requests are answered

The routes under [Relayed to vLLM](#relayed-to-vllm) are vLLM's own. The gateway checks a request
and passes its bytes to a decode replica. The client gets the bytes of the replica's answer. Which
routes there are depends on the installed vLLM: the replicas tell the gateway. This page shows
vLLM {vllm}.

- **Keys.** With [keys](keys.md) each request except `GET /health` needs one, as
  `Authorization: Bearer KEY` or as `x-api-key: KEY`. Routes below `/headrace/v1/` take a key with
  the role admin.
- **Request ids.** A client may send `x-request-id`: 1 to 128 letters, digits, `_`, `.`, `:` and
  `-`. The answer carries it. `GET /headrace/v1/plans/ID` then shows where the request was computed.
  A request to `/v1/responses` is known there by the `id` of its answer. `request_id` in the body of
  a chat, a completion or a response with `store: false` becomes the id of the answer, after its
  usual beginning.
- **Errors.** A refusal of the gateway looks like one of the API that was called:
  `{{"error": {{"message", "type", "param", "code"}}}}` for OpenAI's, `{{"type": "error", "error":
  {{"type", "message"}}}}` for Anthropic's. Errors of vLLM are passed on as they are, those of
  `/v1/messages` in Anthropic's shape and with Anthropic's types.
- **Streams** are passed on event by event. If a replica dies in the middle of a stream, another one
  [resumes it](resume.md). If it dies before the first byte, the request is sent to another one,
  three times at most. A client can [resume its stream](resume.md#when-a-gateway-dies) at another
  gateway.
- **Tenants.** A key proves its tenant, and tenants share no KV and no draft tokens. `cache_salt` in
  the body of a request divides its tenant further. vLLM offers the field in chat completions,
  completions, responses, messages, generative scoring and structured decisions
  (`/v1/systemone`).
- **SLO classes.** With [admission](admission.md) a request may name its class in the header
  `x-headrace-slo`, or in its body as `vllm_xargs.slo`. A name that does not exist is answered 400.
  A request that would come too late is answered 429 with `Retry-After`, at once.
- **Lossy techniques.** `vllm_xargs.techniques: "off"` asks for [exact KV](techniques.md) only; any
  value but that and `"auto"` is answered 400. `vllm_xargs.blending` lets stored KV be
  [reused](blending.md) at other places of the prompt. The header `x-headrace-techniques` of an
  answer says what could be used.
- **Bodies.** A JSON body is in UTF-8, with or without a byte order mark, and not compressed: any
  `Content-Encoding` but `identity` is answered 415.
- **HTTP.** `Upgrade` is ignored: the answer comes over HTTP/1.1. An answer that the gateway gives
  before the request's end has `Connection: close`. A path with slashes at its end is answered 307
  with the path without them.
- **Browsers.** `gateway.allowed_origins` names the sites whose pages may call the API (CORS). None
  may by default. No page may call `/headrace/`. Without keys and TLS, a request whose `Host` is no
  IP address, local name or name in `gateway.allowed_hosts` is answered 403.

- **Tools, reasoning, schemas** work without settings for the families of models that vLLM has
  parsers for; [Tools](tools.md) says which.
- **Cached tokens.** `usage` says how many tokens of the prompt no engine computed: they were in an
  engine's cache or in the KV store. The fields are `prompt_tokens_details.cached_tokens`,
  `input_tokens_details.cached_tokens` and `cache_read_input_tokens`. Several prompts are summed; of
  several samples the first one counts.

What differs from vLLM's own server:

- Routes for vLLM's operator are refused with 404, among them `/scale_elastic_ep`, `/start_profile`,
  `/invocations`, `/inference/v1/generate` and those of `VLLM_SERVER_DEV_MODE`. Only routes of
  vLLM's text generation APIs are relayed. `/v1/load_lora_adapter` and `/v1/unload_lora_adapter`
  exist in an app with [LoRA adapters](adapters.md), for administrators.
- `kv_transfer_params` and `ec_transfer_params` of a request are dropped: they name memory.
- The gateway keeps [conversation state](conversations.md): `store`, `previous_response_id`,
  `conversation` and `background` of `/v1/responses`. vLLM's own store, which keeps answers without
  a bound and in the memory of one replica, is off; `VLLM_ENABLE_RESPONSES_API_STORE` is ignored.
  A response that is kept has an id of the gateway's.
- What vLLM would ignore is answered 400 with the field in `param`: `guided_json` and its kin,
  `priority` where the engine does not schedule by it, `watermarking` where it has no watermark,
  parts of a schema that nothing enforces, tools and items of `/v1/responses` that only OpenAI's
  service has. A `request_id` has the letters of an `x-request-id`.
- A stream that the engine refuses is answered 400, not by a stream of one error.
- Streams of `/v1/responses` name an item by one id, and end with `response.incomplete` where the
  answer was cut. Messages of `/v1/messages` are called `msg_...` and have `stop_sequence`.
- Lists in a request have a longest length: {items}. `messages` and `input` have at most {parts}
  items and parts of items together.
- A request whose answer could have more than {logprobs} log-probabilities is refused with 400: the
  number of choices, prompts and tokens, and `top_logprobs`, count. An answer without a limit counts
  as {tokens} tokens.
- An error of a replica has at most {error_kib} KiB.
- `GET /health` and `GET /version` speak of Headrace.
"""


def render(document: Mapping[str, Any], vllm: str) -> str:
    """Return the whole page in Markdown.

    Args:
        document: the result of `openapi_document`.
        vllm: the version of vLLM whose routes the document holds.
    """
    ours = own_operations(GatewaySettings())
    own = {(operation.method.lower(), operation.path) for operation in ours}
    sections: dict[str, list[str]] = {"Relayed to vLLM": [], "The gateway's own": []}
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            title = "The gateway's own" if (method, path) in own else "Relayed to vLLM"
            sections[title].append(_operation(document, method, path, operation))
    items = ", ".join(f"`{name}` {maximum:,}" for name, maximum in MAX_ITEMS.items())
    header = INTRODUCTION.format(
        vllm=vllm,
        items=items,
        parts=f"{MAX_MESSAGE_PARTS:,}",
        logprobs=f"{MAX_LOGPROBS:,}",
        tokens=f"{DEFAULT_TOKENS:,}",
        error_kib=MAX_ERROR_BYTES // 1024,
    )
    parts = [header]
    for title, operations in sections.items():
        parts += [f"## {title}\n", *operations]
    return "\n".join(parts)


def _operation(
    document: Mapping[str, Any], method: str, path: str, operation: Mapping[str, Any]
) -> str:
    lines = [f"### {method.upper()} {path}", "", operation.get("summary", "").rstrip(".") + ".", ""]
    for parameter in operation.get("parameters", ()):
        kind = _type(document, parameter["schema"])
        lines.append(f"- `{parameter['name']}` in the {parameter['in']}: {kind}.")
    if operation.get("parameters"):
        lines.append("")
    if method == "post" and "{" not in path and "requestBody" not in operation:
        lines += ["vLLM's document does not describe the body, a JSON object.", ""]
    content = operation.get("requestBody", {}).get("content", {})
    body: Mapping[str, Any] = next(iter(content.values()), {})
    for schema in _alternatives(document, body.get("schema", {})):
        lines += [*_fields(document, schema), ""]
    statuses = ", ".join(sorted(status for status in operation["responses"] if status != "200"))
    return "\n".join([*lines, f"Other answers than 200: {statuses}.", ""])


def _alternatives(document: Mapping[str, Any], schema: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the schemas of all objects that a body may be."""
    schema = _resolved(document, schema)
    for branch in schema.get("anyOf", schema.get("oneOf", ())):
        yield from _alternatives(document, branch)
    if "properties" in schema:
        yield schema


def _fields(document: Mapping[str, Any], schema: Mapping[str, Any]) -> Iterator[str]:
    about = schema.get("description", "").strip().partition("\n\n")[0]
    yield f"Body `{schema.get('title', 'object')}`" + (f": {_line(about)}" if about else "")
    yield ""
    yield "| Field | Type | Default | Meaning |"
    yield "| --- | --- | --- | --- |"
    for name, field in schema["properties"].items():
        required = name in schema.get("required", ())
        default = "required" if required else f"`{json.dumps(field.get('default'))}`"
        about = _line(field.get("description", ""))
        kind, about = _type(document, field), PLAINER.get(about, about)
        yield f"| `{name}` | {kind} | {default} | {about} |"


def _type(document: Mapping[str, Any], schema: Mapping[str, Any]) -> str:
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        target = _resolved(document, schema)
        return _type(document, target) if "properties" not in target else f"`{name}`"
    for word in ("anyOf", "oneOf"):
        if word in schema:
            kinds = dict.fromkeys(_type(document, each) for each in schema[word])
            return " or ".join(kinds) if len(kinds) <= 4 else f"one of {len(kinds)} kinds"
    if "enum" in schema or "const" in schema:
        return ", ".join(f"`{value}`" for value in schema.get("enum", [schema.get("const")]))
    if schema.get("type") == "array":
        return "list of " + _type(document, schema.get("items", {}))
    return {
        "integer": "whole number",
        "number": "number",
        "string": "text",
        "boolean": "true or false",
        "object": "object",
        "null": "null",
    }.get(str(schema.get("type")), "value")


def _resolved(document: Mapping[str, Any], schema: Mapping[str, Any]) -> Mapping[str, Any]:
    while "$ref" in schema:
        schema = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    return schema


def _line(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def page() -> str:
    """Return the page for the installed vLLM."""
    from headrace_decode.http.public_routes import public_routes
    from headrace_engine.vllm.kv_cache import vllm_version
    from headrace_engine.vllm.openai_app import application_without_engine

    application = application_without_engine()
    document = openapi_document(
        "1",
        GatewaySettings(),
        keys_on=True,
        routes=public_routes(application),
        replica=application.openapi(),
    )
    return render(document, vllm_version().partition("+")[0])
