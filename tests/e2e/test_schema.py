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

from tests.support.app import App

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("same_replicas"),
    pytest.mark.timeout(240),
]

MOST_TOKENS = 4
ANSWER_LIMIT_S = 60.0


@pytest.fixture(scope="module")
def published(_running_app: App) -> Any:
    """What the app itself publishes, without PUT, which would change it for the other tests."""
    document = schemathesis.openapi.from_url(f"{_running_app.url}/openapi.json")
    return document.exclude(method="PUT")


schema = schemathesis.pytest.from_fixture("published")


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
def test_every_operation_keeps_its_word(case: Any, _running_app: App) -> None:
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
