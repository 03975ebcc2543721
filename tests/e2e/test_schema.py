"""Schemathesis over the OpenAPI document: no 5xx, no hang, no status that is not documented."""

from __future__ import annotations

import time
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from headrace.config.gateway import GatewaySettings
from headrace.gateway.admin import headrace_version
from headrace.gateway.openapi import openapi_document
from tests.support.app import App

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("same_replicas"),
    pytest.mark.timeout(240),
]

MAX_TOKENS = 4
ANSWER_LIMIT_S = 60.0
SETTINGS = settings(derandomize=True, suppress_health_check=list(HealthCheck), max_examples=6)

OWN = openapi_document(headrace_version(), GatewaySettings(), keys_on=False)
own = schemathesis.openapi.from_dict(OWN).exclude(method="PUT")
"""Without PUT, which would change the app that the other tests use."""


def test_the_app_publishes_its_own_operations_and_vllms(app: App) -> None:
    document = app.get("/openapi.json")
    assert OWN["paths"].items() <= document["paths"].items()
    completion = document["paths"]["/v1/completions"]["post"]["requestBody"]
    schema = completion["content"]["application/json"]["schema"]
    assert "vllm_xargs" in document["components"]["schemas"][schema["$ref"][21:]]["properties"]
    for path in ("/v1/responses", "/v1/messages", "/tokenize", "/v1/completions/render"):
        assert "post" in document["paths"][path]


def shortened(body: Any) -> Any:
    """The body with a short answer: what is asked for is checked, not how long it can go on."""
    if not isinstance(body, dict):
        return body
    for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
        value = body.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value > MAX_TOKENS:
            body[name] = MAX_TOKENS
    if body.get("max_tokens") is None and body.get("max_completion_tokens") is None:
        body["max_tokens"] = body["max_output_tokens"] = MAX_TOKENS
    body.pop("min_tokens", None)
    if isinstance(body.get("n"), int) and body["n"] > 2:
        body["n"] = 2
    if body.get("use_beam_search"):
        body["use_beam_search"] = False
    return body


def answered(case: Any, app: App) -> Any:
    """The answer, which comes in time."""
    if case.media_type != "multipart/form-data":
        case.body = shortened(case.body)
    started = time.monotonic()
    response = case.call(base_url=app.url, timeout=ANSWER_LIMIT_S)
    assert time.monotonic() - started < ANSWER_LIMIT_S
    return response


@own.parametrize()
@SETTINGS
def test_every_operation_of_ours_keeps_its_word(case: Any, _running_app: App) -> None:
    response = answered(case, _running_app)
    checks = [not_a_server_error, status_code_conformance, content_type_conformance]
    case.validate_response(response, checks=[*checks, response_schema_conformance])


def test_every_operation_of_vllms_is_answered_with_a_status_that_it_names(app: App) -> None:
    """vLLM's document is wrong about some bodies of errors, so these are not compared. Its own 500
    (for items of a response's input that it cannot render, say) is passed on; no replica is lost.
    """
    published = schemathesis.openapi.from_dict(app.get("/openapi.json"))
    operations = [found.ok() for found in published.get_all_operations()]
    theirs = [each for each in operations if each.path not in OWN["paths"]]
    assert len(theirs) > 10
    for operation in theirs:

        @given(operation.as_strategy())
        @settings(SETTINGS, phases=[Phase.generate])
        def check(case: Any) -> None:
            response = answered(case, app)
            assert response.status_code not in (502, 503, 504), case.operation.label
            case.validate_response(response, checks=[status_code_conformance])

        check()


def test_afterwards_nothing_is_left(app: App) -> None:
    app.wait_idle(limit_s=40)
