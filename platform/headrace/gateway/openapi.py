"""The OpenAPI document: the gateway's own operations, and the relayed operations of the replicas.

The bodies of relayed requests go to vLLM unchanged, so their schemas are vLLM's own, taken from the
document of the replica's application. The gateway adds the refusals that it makes itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from headrace.config.gateway import GatewaySettings
from headrace.gateway.adapters import LOAD_ADAPTER, UNLOAD_ADAPTER, LoadAdapter, UnloadAdapter
from headrace.gateway.admin_schemas import RouterPolicy, SpeculationUpdate, StoreAction, WarmRequest
from headrace.gateway.batches.routes import BATCHES, FILES, BatchCreate, FileUpload
from headrace.gateway.conversations.routes import (
    CONVERSATIONS,
    RESPONSES,
    ConversationCreate,
    ConversationItems,
    ConversationUpdate,
)
from headrace.gateway.corpora import CORPORA, CorpusPart
from headrace.gateway.usage.routes import FIELDS, USAGE
from headrace_decode.http.public_routes import Route

Schema = dict[str, Any]

METRICS = "/metrics"
MODELS = "/v1/models"
CONSOLE_STATE = "/headrace/v1/console"
REQUESTS = "/headrace/v1/requests"
HISTORY = "/headrace/v1/history"
PLANS = "/headrace/v1/plans/"
ROUTER = "/headrace/v1/router"
SPECULATION = "/headrace/v1/speculation"
WARM = "/headrace/v1/warm"
STORE = "/headrace/v1/store"

_ERRORS = {
    400: "The request is malformed or a field is wrong.",
    401: "The API key is missing or wrong.",
    403: "It takes a key with the role admin or, without keys, a client on the gateway's machine; "
    "or the request's `Host` is no name of the endpoint.",
    404: "There is no such route, model, plan, usage, corpus, response, conversation, item, file "
    "or batch.",
    405: "The method does not fit the route.",
    408: "The request body did not arrive in time.",
    409: "No replica drafts from a memory, or all refuse; the message says what to set. Or the "
    "file is in use, or the batch has ended.",
    413: "The request body is too large.",
    415: "The request body is compressed in a way that is not supported.",
    429: "Too many requests are in progress; `Retry-After` says when to try again.",
    500: "The engine or the gateway failed.",
    501: "vLLM does not do this for the model as it is configured.",
    502: "The replica died, several times in a row, while it worked on the request.",
    503: "No replica is ready; `Retry-After` says when to try again.",
    504: "The request took longer than its limit.",
}
_RELAYED_ERRORS = (400, 401, 403, 404, 405, 408, 413, 415, 429, 500, 501, 502, 503, 504)
_CHANGE_ERRORS = (400, 401, 403, 405, 408, 413, 415, 429, 500, 504)
_REF = "#/components/schemas/"


@dataclass(frozen=True)
class Operation:
    """One operation of the gateway's own.

    Attributes:
        body: the model of the request's body; None if it has none.
        errors: the statuses of its refusals.
        takes: the media type of its body.
        answer: the media type of its answer.
        query: the parameters in its query.
    """

    method: str
    path: str
    summary: str
    errors: tuple[int, ...] = (401, 405, 429)
    body: type[BaseModel] | None = None
    takes: str = "application/json"
    answer: str = "application/json"
    query: tuple[str, ...] = ()

    def document(self) -> Schema:
        """Return the operation's OpenAPI object."""
        schema = {"type": "object" if self.answer == "application/json" else "string"}
        names = [part[1:-1] for part in self.path.split("/") if part.startswith("{")]
        parameters = [_parameter(name, "path") for name in names]
        parameters += [_parameter(name, "query") for name in self.query]
        found: Schema = {
            "summary": self.summary,
            "responses": {
                "200": {"description": "The answer.", "content": {self.answer: {"schema": schema}}},
                **{str(status): _refusal(status) for status in self.errors},
            },
        }
        if parameters:
            found["parameters"] = parameters
        if self.body is not None:
            content = {self.takes: {"schema": {"$ref": _REF + self.body.__name__}}}
            found["requestBody"] = {"required": True, "content": content}
        if self.path in ("/health", "/console"):
            found["security"] = []
        return found


OPERATIONS = (
    Operation("GET", "/", "The endpoints. A browser is redirected to the web console."),
    Operation("GET", "/health", "Whether a replica is ready.", (405, 503)),
    Operation("GET", "/version", "Headrace's version."),
    Operation("GET", "/openapi.json", "This document.", (401, 405, 429, 500, 504)),
    Operation(
        "GET",
        METRICS,
        "Metrics in Prometheus' text format. `?name[]=NAME`, which may be repeated, returns those "
        "with these names.",
        (401, 405, 429, 500, 504),
        answer="text/plain",
        query=("name[]",),
    ),
    Operation("GET", MODELS + "/{model}", "One model.", (401, 404, 405, 429, 500, 502, 503, 504)),
    Operation(
        "GET", "/headrace/v1/status", "The state of the cluster.", (401, 403, 405, 429, 500, 504)
    ),
    Operation(
        "GET",
        CONSOLE_STATE,
        "The same, at most a second old: for the web console, however many pages are open.",
        (401, 403, 405, 429, 500, 504),
    ),
    Operation(
        "GET",
        REQUESTS,
        "This gateway's requests in flight, and its last 200 finished ones.",
        (401, 403, 405, 429, 500, 504),
    ),
    Operation(
        "GET",
        HISTORY,
        "This gateway's requests, errors, tokens, TTFT and time per output token over time.",
        (401, 403, 405, 429, 500, 504),
    ),
    Operation(
        "GET",
        USAGE,
        "What requests cost, by tenant and model, in whole hours; a key that is no administrator's "
        "sees its tenant's. `since` and `until`: like 2026-11-01, 24h or Unix seconds.",
        (400, 401, 403, 404, 405, 429, 500, 503, 504),
        query=FIELDS,
    ),
    Operation(
        "GET",
        USAGE + "/{request_id}",
        "What one of the last requests cost, in all and at each replica.",
        (401, 403, 404, 405, 429, 500, 504),
    ),
    Operation("GET", "/console", "The web console.", (404, 405), answer="text/html"),
    Operation(
        "GET",
        PLANS + "{request_id}",
        "The plan of a request, with its reasons.",
        (401, 403, 404, 405, 429, 500, 504),
    ),
    Operation(
        "PUT",
        ROUTER,
        "Force plans local or remote, or let them follow the cost.",
        _CHANGE_ERRORS,
        RouterPolicy,
    ),
    Operation(
        "PUT",
        SPECULATION,
        "Change the mode and the limit of speculative decoding.",
        _CHANGE_ERRORS,
        SpeculationUpdate,
    ),
    Operation("POST", WARM, "Compute the KV of prompts in advance.", _CHANGE_ERRORS, WarmRequest),
    Operation(
        "GET", STORE, "Pinned prompts of each machine's store.", (401, 403, 405, 429, 500, 504)
    ),
    Operation(
        "POST",
        STORE,
        "Unpin or clear blocks of each machine's store, or look one up.",
        _CHANGE_ERRORS,
        StoreAction,
    ),
    Operation(
        "GET",
        CORPORA,
        "List the corpora.",
        (401, 403, 405, 409, 429, 500, 504),
    ),
    Operation(
        "PUT",
        CORPORA + "/{corpus}",
        "Load a corpus for speculative decoding, or a part of it.",
        (*_CHANGE_ERRORS, 409),
        CorpusPart,
    ),
    Operation(
        "DELETE",
        CORPORA + "/{corpus}",
        "Remove a corpus.",
        (400, 401, 403, 404, 405, 409, 500, 504),
        query=("tenant",),
    ),
)

ADAPTER_OPERATIONS = (
    Operation(
        "POST",
        LOAD_ADAPTER,
        "Load a LoRA adapter at all replicas.",
        (*_CHANGE_ERRORS, 503),
        LoadAdapter,
    ),
    Operation(
        "POST",
        UNLOAD_ADAPTER,
        "Unload a LoRA adapter at all replicas.",
        (*_CHANGE_ERRORS, 404),
        UnloadAdapter,
    ),
)
"""Operations of an app with LoRA adapters."""

_STATE_ERRORS = (400, 401, 404, 405, 429, 500, 503, 504)
_STATE_CHANGE_ERRORS = (400, 401, 404, 405, 408, 413, 415, 429, 500, 503, 504)
_LIST = ("after", "limit", "order")
_RESPONSE = RESPONSES + "/{response_id}"
_CONVERSATION = CONVERSATIONS + "/{conversation_id}"
_ITEM = _CONVERSATION + "/items/{item_id}"
STATE_OPERATIONS = (
    Operation("GET", _RESPONSE, "A kept response.", _STATE_ERRORS),
    Operation("DELETE", _RESPONSE, "Delete a kept response.", _STATE_ERRORS),
    Operation(
        "GET",
        _RESPONSE + "/input_items",
        "The items of a kept response's own input.",
        _STATE_ERRORS,
        query=_LIST,
    ),
    Operation("POST", _RESPONSE + "/cancel", "Cancel a background response.", _STATE_ERRORS),
    Operation(
        "POST", CONVERSATIONS, "Begin a conversation.", _STATE_CHANGE_ERRORS, ConversationCreate
    ),
    Operation("GET", _CONVERSATION, "A conversation.", _STATE_ERRORS),
    Operation(
        "POST",
        _CONVERSATION,
        "Set a conversation's metadata.",
        _STATE_CHANGE_ERRORS,
        ConversationUpdate,
    ),
    Operation(
        "DELETE",
        _CONVERSATION,
        "Delete a conversation and its items; its responses stay.",
        _STATE_ERRORS,
    ),
    Operation(
        "GET",
        _CONVERSATION + "/items",
        "The items of a conversation.",
        _STATE_ERRORS,
        query=_LIST,
    ),
    Operation(
        "POST",
        _CONVERSATION + "/items",
        "Add items to a conversation.",
        _STATE_CHANGE_ERRORS,
        ConversationItems,
    ),
    Operation("GET", _ITEM, "An item of a conversation.", _STATE_ERRORS),
    Operation("DELETE", _ITEM, "Delete an item; returns the conversation.", _STATE_ERRORS),
)
"""Operations that exist while conversation state is kept."""

_FILE, _BATCH = FILES + "/{file_id}", BATCHES + "/{batch_id}"
BATCH_OPERATIONS = (
    Operation(
        "GET", FILES, "The files.", _STATE_ERRORS, query=("purpose", "after", "limit", "order")
    ),
    Operation(
        "POST",
        FILES,
        "Upload a file of requests, as a form.",
        (400, 401, 405, 408, 413, 415, 429, 500, 503, 504),
        FileUpload,
        takes="multipart/form-data",
    ),
    Operation("GET", _FILE, "A file without its content.", _STATE_ERRORS),
    Operation("DELETE", _FILE, "Delete a file.", (*_STATE_ERRORS, 409)),
    Operation(
        "GET",
        _FILE + "/content",
        "The content of a file.",
        _STATE_ERRORS,
        answer="application/octet-stream",
    ),
    Operation("GET", BATCHES, "The batches.", _STATE_ERRORS, query=_LIST),
    Operation("POST", BATCHES, "Make a batch of a file.", _STATE_CHANGE_ERRORS, BatchCreate),
    Operation("GET", _BATCH, "A batch with its progress.", _STATE_ERRORS),
    Operation("POST", _BATCH + "/cancel", "Cancel a batch.", (*_STATE_ERRORS, 409)),
)
"""Operations of a gateway with batches."""


def own_operations(
    settings: GatewaySettings, *, has_adapters: bool = False
) -> tuple[Operation, ...]:
    """Return the gateway's own operations."""
    state = STATE_OPERATIONS if settings.conversations.enabled else ()
    batches = BATCH_OPERATIONS if settings.batches.enabled else ()
    return OPERATIONS + (ADAPTER_OPERATIONS if has_adapters else ()) + state + batches


def openapi_document(
    version: str,
    settings: GatewaySettings,
    *,
    keys_on: bool,
    has_adapters: bool = False,
    routes: Iterable[Route] = (),
    replica: Mapping[str, Any] | None = None,
) -> Schema:
    """Return the OpenAPI 3.1 document.

    Args:
        version: the API's version.
        settings: the limits that the description states, and whether conversation state is kept.
        keys_on: whether the security scheme applies.
        has_adapters: whether the app has LoRA adapters.
        routes: the relayed routes.
        replica: the document of the replica's application; None or empty if unknown.
    """
    operations = own_operations(settings, has_adapters=has_adapters)
    bodies = [operation.body for operation in operations if operation.body is not None]
    _, own = models_json_schema(
        [(body, "validation") for body in bodies], ref_template=_REF + "{model}"
    )
    paths: Schema = {}
    for operation in operations:
        paths.setdefault(operation.path, {})[operation.method.lower()] = operation.document()
    own_paths = frozenset(paths)
    replica = replica or {}
    for route in sorted(routes, key=lambda route: (route.path, route.method)):
        if route.path in own_paths and route.path.startswith(RESPONSES + "/"):
            continue  # vLLM's own store is off
        known = replica.get("paths", {}).get(route.path, {}).get(route.method.lower(), {})
        paths.setdefault(route.path, {})[route.method.lower()] = _relayed(known)
    schemas: Schema = {**own["$defs"], "Error": _ERROR}
    _add_referred(schemas, replica.get("components", {}).get("schemas", {}), paths)
    components: Schema = {"schemas": schemas}
    document: Schema = {
        "openapi": "3.1.0",
        "info": {
            "title": "Headrace",
            "version": version,
            "description": (
                f"An OpenAI-compatible endpoint. Limits: {settings.max_body_bytes} bytes a body, "
                f"{settings.request_timeout_s:g} s a request, {settings.max_concurrent} at once."
            ),
        },
        "paths": paths,
        "components": components,
    }
    if keys_on:
        components["securitySchemes"] = {"ApiKey": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"ApiKey": []}]
    return document


_TEXT_OR_NULL = {"anyOf": [{"type": "string"}, {"type": "null"}]}
_ERROR: Schema = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": _TEXT_OR_NULL,
                "code": {"type": ["string", "integer", "null"]},
            },
        }
    },
}


def _relayed(known: Mapping[str, Any]) -> Schema:
    """Return a replica's operation, with the gateway's own refusals added."""
    answers = {"200": {"description": "The answer."}, **known.get("responses", {})}
    answers |= {
        str(status): _refusal(status) for status in _RELAYED_ERRORS if str(status) not in answers
    }
    return {**known, "responses": answers}


def _refusal(status: int) -> Schema:
    content = {"application/json": {"schema": {"$ref": _REF + "Error"}}}
    return {"description": _ERRORS[status], "content": content}


def _parameter(name: str, where: str) -> Schema:
    schema: Schema = {"type": "string", "minLength": 1} if where == "path" else {"type": "string"}
    return {"name": name, "in": where, "required": where == "path", "schema": schema}


def _add_referred(schemas: Schema, theirs: Mapping[str, Any], paths: Schema) -> None:
    """Add the schemas of `theirs` that the paths refer to, directly or through other schemas."""
    left: list[Any] = [paths]
    while left:
        node = left.pop()
        if isinstance(node, list):
            left += node
        elif isinstance(node, dict):
            left += node.values()
            name = str(node.get("$ref", "")).removeprefix(_REF)
            if name in theirs and name not in schemas:
                schemas[name] = theirs[name]
                left.append(theirs[name])
