"""The OpenAPI document of the gateway's routes.

Written by hand, since most bodies pass through to vLLM, which validates them: the schema names
OpenAI's main fields with their bounds, and allows the rest.
"""

from __future__ import annotations

from typing import Any

from headrace.gateway.backend import GatewayOptions

Schema = dict[str, Any]

_ERRORS = {
    400: "The request is malformed or a field is wrong.",
    401: "The API key is missing or wrong.",
    403: "Only the gateway's own machine may do this.",
    404: "There is no such route, model or plan.",
    405: "The method does not fit the route.",
    408: "The request body did not arrive in time.",
    409: "No replica drafts from a memory, or all refuse; the message says what to set.",
    413: "The request body is too large.",
    415: "The content type is not supported.",
    422: "A field cannot be processed.",
    429: "Too many requests are in progress; `Retry-After` says when to try again.",
    500: "The engine or the gateway failed.",
    502: "The replica died, several times in a row, while it worked on the request.",
    503: "No replica is ready; `Retry-After` says when to try again.",
    504: "The request took longer than its limit.",
}


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _nullable(schema: Schema) -> Schema:
    """The schema, or null."""
    return {"anyOf": [schema, {"type": "null"}]}


def _number(low: float, high: float, **more: Any) -> Schema:
    return _nullable({"type": "number", "minimum": low, "maximum": high, **more})


def _integer(low: int, high: int) -> Schema:
    return _nullable({"type": "integer", "minimum": low, "maximum": high})


def _array(items: Schema, **more: Any) -> Schema:
    return {"type": "array", "items": items, **more}


_STRING: Schema = {"type": "string"}
_BOOLEAN: Schema = {"type": "boolean"}
_OBJECT: Schema = {"type": "object", "additionalProperties": True}
_MAX_TOKENS = _integer(1, 2**31 - 1)


def _sampling(model_id: str) -> Schema:
    """The fields that both kinds of requests share."""
    stop = {"anyOf": [_STRING, _array(_STRING, maxItems=4), {"type": "null"}]}
    return {
        "model": {"type": "string", "examples": [model_id]},
        "max_tokens": _MAX_TOKENS,
        "temperature": _number(0, 2),
        "top_p": _nullable({"type": "number", "exclusiveMinimum": 0, "maximum": 1}),
        "n": _integer(1, 8),
        "stream": _nullable(_BOOLEAN),
        "stream_options": _nullable({"type": "object", "properties": {"include_usage": _BOOLEAN}}),
        "stop": stop,
        "seed": _integer(-(2**63), 2**63 - 1),
        "presence_penalty": _number(-2, 2),
        "frequency_penalty": _number(-2, 2),
        "logit_bias": _nullable({"type": "object", "additionalProperties": {"type": "number"}}),
        "user": _nullable(_STRING),
    }


def _chat_request(model_id: str) -> Schema:
    function = {
        "type": "object",
        "required": ["name"],
        "properties": {
            "name": {"type": "string", "pattern": "^[A-Za-z0-9_-]{1,64}$"},
            "description": _STRING,
            "parameters": _OBJECT,
        },
    }
    tool = {
        "type": "object",
        "required": ["type", "function"],
        "properties": {"type": {"const": "function"}, "function": function},
    }
    choice = {
        "type": "object",
        "required": ["type", "function"],
        "properties": {
            "type": {"const": "function"},
            "function": {
                "type": "object",
                "required": ["name"],
                "properties": {"name": _STRING},
            },
        },
    }
    response_format = {
        "type": "object",
        "required": ["type"],
        "properties": {
            "type": {"enum": ["text", "json_object", "json_schema"]},
            "json_schema": {
                "type": "object",
                "required": ["name", "schema"],
                "properties": {"name": _STRING, "schema": _OBJECT, "strict": _BOOLEAN},
            },
        },
    }
    part = {
        "type": "object",
        "required": ["type", "text"],
        "properties": {"type": {"const": "text"}, "text": _STRING},
    }
    message = {
        "type": "object",
        "required": ["role", "content"],
        "properties": {
            "role": {"enum": ["system", "user", "assistant", "tool"]},
            "content": {"anyOf": [_STRING, _array(part, minItems=1)]},
            "name": _STRING,
            "tool_call_id": _STRING,
        },
    }
    properties = _sampling(model_id) | {
        "messages": _array(message, minItems=1),
        "max_completion_tokens": _MAX_TOKENS,
        "logprobs": _nullable(_BOOLEAN),
        "top_logprobs": _integer(0, 20),
        "tools": _nullable(_array(tool, minItems=1, maxItems=128)),
        "tool_choice": {
            "anyOf": [{"enum": ["none", "auto", "required"]}, choice, {"type": "null"}]
        },
        "response_format": _nullable(response_format),
    }
    return {
        "type": "object",
        "required": ["model", "messages"],
        "properties": properties,
        "additionalProperties": True,
    }


def _completion_request(model_id: str) -> Schema:
    token = {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}
    prompt = {
        "anyOf": [
            {"type": "string", "minLength": 1},
            _array({"type": "string", "minLength": 1}, minItems=1),
            _array(token, minItems=1),
            _array(_array(token, minItems=1), minItems=1),
        ]
    }
    properties = _sampling(model_id) | {
        "prompt": prompt,
        "logprobs": _integer(0, 5),
        "echo": _nullable(_BOOLEAN),
        "suffix": _nullable(_STRING),
    }
    return {
        "type": "object",
        "required": ["model", "prompt"],
        "properties": properties,
        "additionalProperties": True,
    }


def _schemas(model_id: str) -> Schema:
    error = {
        "type": "object",
        "required": ["message", "type", "code"],
        "properties": {
            "message": _STRING,
            "type": _STRING,
            "param": _nullable(_STRING),
            "code": {"type": ["string", "integer", "null"]},
        },
    }
    completion = {
        "type": "object",
        "required": ["id", "object", "created", "model", "choices"],
        "properties": {
            "id": _STRING,
            "object": _STRING,
            "created": {"type": "integer"},
            "model": _STRING,
            "choices": _array(_OBJECT),
            "usage": _nullable(_OBJECT),
        },
    }
    model = {
        "type": "object",
        "required": ["id", "object"],
        "properties": {"id": _STRING, "object": {"const": "model"}},
    }
    models = {
        "type": "object",
        "required": ["object", "data"],
        "properties": {"object": {"const": "list"}, "data": _array(_ref("Model"))},
    }
    return {
        "Error": {"type": "object", "required": ["error"], "properties": {"error": error}},
        "ChatCompletionRequest": _chat_request(model_id),
        "CompletionRequest": _completion_request(model_id),
        "Completion": completion,
        "Model": model,
        "ModelList": models,
        "Object": _OBJECT,
        "RouterPolicy": {
            "type": "object",
            "required": ["policy"],
            "properties": {"policy": {"type": "string", "enum": ["cost", "local", "remote"]}},
            "additionalProperties": False,
        },
        "Speculation": {
            "type": "object",
            "anyOf": [{"required": ["mode"]}, {"required": ["draft_cap"]}],
            "properties": {
                "mode": {"type": "string", "pattern": "^(auto|off|static:[1-9][0-9]{0,2})$"},
                "draft_cap": {"type": ["integer", "null"], "minimum": 0},
                "for_s": {"type": "number", "exclusiveMinimum": 0, "maximum": 604800},
            },
            "additionalProperties": False,
        },
        "CorpusPart": {
            "type": "object",
            "description": "A corpus, or with `part` and `more` a part of one.",
            "required": ["texts"],
            "properties": {
                "texts": _array({"type": "string", "minLength": 1}),
                "tenant": _nullable({"type": "string", "maxLength": 256}),
                "ttl_s": _nullable({"type": "number", "exclusiveMinimum": 0}),
                "tag": {"type": "string", "maxLength": 256},
                "version": _nullable({"type": "integer", "minimum": 1}),
                "part": {"type": "integer", "minimum": 0},
                "more": _BOOLEAN,
                "total_chars": {"type": "integer", "minimum": 0},
            },
            "additionalProperties": False,
        },
        "WarmRequest": {
            "type": "object",
            "description": "1 to 256 prompts and chats whose KV shall be made now.",
            "properties": {
                "prompts": {
                    "type": "array",
                    "items": {
                        "oneOf": [
                            {"type": "string", "minLength": 1},
                            {
                                "type": "array",
                                "items": {"type": "integer", "minimum": 0},
                                "minItems": 1,
                            },
                        ]
                    },
                },
                "chats": {
                    "type": "array",
                    "items": {"type": "array", "items": _ref("Object"), "minItems": 1},
                },
                "cache_salt": {"type": "string"},
                "pin": {"type": "boolean"},
            },
            "additionalProperties": False,
        },
    }


def _change(summary: str, body: str, *statuses: int) -> Schema:
    """An operation that takes this body and answers with a JSON object."""
    return {
        "summary": summary,
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": _ref(body)}},
        },
        "responses": _responses(
            {"application/json": {"schema": _ref("Object")}}, *_CHANGE_REFUSALS, *statuses
        ),
    }


def _responses(ok: Schema, *statuses: int) -> Schema:
    """A 200 with this content, and these errors in the shape that all share."""
    found: Schema = {"200": {"description": "The answer.", "content": ok}}
    content = {"application/json": {"schema": _ref("Error")}}
    for status in statuses:
        found[str(status)] = {"description": _ERRORS[status], "content": content}
    return found


def _get(summary: str, schema: Schema, *statuses: int, **more: Any) -> Schema:
    ok = {"application/json": {"schema": schema}}
    answers = _responses(ok, 401, 405, *statuses)
    return {"get": {"summary": summary, "responses": answers, **more}}


def _post(summary: str, schema: str) -> Schema:
    ok = {
        "application/json": {"schema": _ref("Completion")},
        "text/event-stream": {"schema": _STRING},
    }
    body = {"required": True, "content": {"application/json": {"schema": _ref(schema)}}}
    statuses = [400, 401, 404, 405, 408, 413, 415, 422, 429, 500, 502, 503, 504]
    responses = _responses(ok, *statuses)
    return {"post": {"summary": summary, "requestBody": body, "responses": responses}}


def _path_parameter(name: str, example: str) -> Schema:
    return {
        "name": name,
        "in": "path",
        "required": True,
        "schema": {"type": "string", "minLength": 1},
        "example": example,
    }


_CHANGE_REFUSALS = (400, 401, 403, 405, 408, 413, 415, 500, 504)


def openapi_document(
    model_id: str, version: str, options: GatewayOptions, *, keys_on: bool
) -> Schema:
    """The OpenAPI 3.1 document.

    Args:
        model_id: stands as the example of a model's name.
        version: the API's version.
        options: the limits that the description states.
        keys_on: whether the security scheme applies.
    """
    model = _path_parameter("model", model_id)
    request = _path_parameter("request_id", "chat-1")
    health: Schema = {"type": "object", "required": ["status"], "properties": {"status": _STRING}}
    healthy = _responses({"application/json": {"schema": health}}, 405)
    healthy["503"] = {
        "description": "No replica is ready.",
        "content": {"application/json": {"schema": health}},
    }
    text = {"text/plain": {"schema": _STRING}}
    metrics = {
        "summary": "Metrics in Prometheus' text format.",
        "responses": _responses(text, 401, 405, 500, 504),
    }
    anything = _ref("Object")
    paths: Schema = {
        "/": _get("The endpoints.", anything),
        "/health": {
            "get": {"summary": "Whether a replica is ready.", "responses": healthy, "security": []}
        },
        "/version": _get("Headrace's version.", anything),
        "/openapi.json": _get("This document.", anything),
        "/metrics": {"get": metrics},
        "/v1/models": _get("The models.", _ref("ModelList"), 429, 500, 502, 503, 504),
        "/v1/models/{model}": _get(
            "One model.", _ref("Model"), 404, 429, 500, 502, 503, 504, parameters=[model]
        ),
        "/v1/chat/completions": _post("Continue a conversation.", "ChatCompletionRequest"),
        "/v1/completions": _post("Continue a text.", "CompletionRequest"),
        "/headrace/v1/status": _get("The state of the cluster.", anything, 500, 504),
        "/headrace/v1/router": {
            "put": _change(
                "Force plans local or remote, or let them follow the cost.", "RouterPolicy"
            )
        },
        "/headrace/v1/speculation": {
            "put": _change("How far decode replicas draft, and whether at all.", "Speculation")
        },
        "/headrace/v1/memory": _get("Corpora to draft from.", anything, 403, 409, 500, 504),
        "/headrace/v1/memory/{corpus}": {
            "parameters": [_path_parameter("corpus", "handbook")],
            "put": _change("Load a corpus to draft from, or a part of it.", "CorpusPart", 409),
            "delete": {
                "summary": "Draft from a corpus no more.",
                "parameters": [{"name": "tenant", "in": "query", "schema": _STRING}],
                "responses": _responses(
                    {"application/json": {"schema": anything}},
                    400,
                    401,
                    403,
                    404,
                    405,
                    409,
                    500,
                    504,
                ),
            },
        },
        "/headrace/v1/warm": {
            "post": _change("Make prompts' KV before anybody asks for it.", "WarmRequest")
        },
        "/headrace/v1/plans/{request_id}": _get(
            "Why a request went where it went.", anything, 404, 500, 504, parameters=[request]
        ),
    }
    components: Schema = {"schemas": _schemas(model_id)}
    document: Schema = {
        "openapi": "3.1.0",
        "info": {
            "title": "Headrace",
            "version": version,
            "description": (
                f"An OpenAI-compatible endpoint. Limits: {options.max_body_bytes} bytes a body, "
                f"{options.request_timeout_s:g} s a request, {options.max_concurrent} at once."
            ),
        },
        "paths": paths,
        "components": components,
    }
    if keys_on:
        components["securitySchemes"] = {"ApiKey": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"ApiKey": []}]
    return document
