"""Schemathesis over the OpenAPI document: no 5xx, no hang, no undocumented answer."""

from __future__ import annotations

import time
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from headrace.gateway.admin import headrace_version
from headrace.gateway.backend import GatewayOptions
from headrace.gateway.openapi import openapi_document
from tests.support.app import MODEL, App

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("same_replicas"),
    pytest.mark.timeout(240),
]

MOST_TOKENS = 4
ANSWER_LIMIT_S = 60.0


DOCUMENT = openapi_document(MODEL, headrace_version(), GatewayOptions(), keys_on=False)
schema = schemathesis.openapi.from_dict(DOCUMENT).exclude(method="PUT")
"""Without PUT, which would change the app that the other tests use."""


@pytest.fixture(scope="module")
def published(_running_app: App) -> None:
    """The app publishes the document that the cases here are made from."""
    document = _running_app.get("/openapi.json")
    assert document["paths"] == DOCUMENT["paths"]
    assert document["components"] == DOCUMENT["components"]


def shortened(body: Any) -> Any:
    """The body with a short answer: what is asked for is checked, not how long it can go on."""
    if not isinstance(body, dict):
        return body
    for name in ("max_tokens", "max_completion_tokens"):
        value = body.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value > MOST_TOKENS:
            body[name] = MOST_TOKENS
    if body.get("max_tokens") is None and body.get("max_completion_tokens") is None:
        body["max_tokens"] = MOST_TOKENS
    return body


@schema.parametrize()
@settings(
    max_examples=20,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
def test_every_operation_keeps_its_word(case: Any, _running_app: App, published: None) -> None:
    case.body = shortened(case.body)
    started = time.monotonic()
    response = case.call(base_url=_running_app.url, timeout=ANSWER_LIMIT_S)
    assert time.monotonic() - started < ANSWER_LIMIT_S
    checks = [not_a_server_error, status_code_conformance, content_type_conformance]
    if not response.headers["content-type"][0].startswith("text/event-stream"):
        checks.append(response_schema_conformance)
    case.validate_response(response, checks=checks)


def test_afterwards_nothing_is_left(app: App) -> None:
    app.wait_idle(limit_s=40)
