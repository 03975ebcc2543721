"""The gateway's errors in OpenAI's shape."""

from __future__ import annotations

import pytest

from headrace.gateway import errors
from headrace.gateway.errors import ApiError


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (404, "invalid_request_error"),
        (429, "rate_limit_error"),
        (500, "server_error"),
        (503, "server_error"),
    ],
)
def test_an_error_has_the_type_of_its_status(status: int, kind: str) -> None:
    assert ApiError(status, "No.").document()["error"]["type"] == kind


def test_a_request_that_kills_replicas_is_refused_as_a_fault_of_the_server() -> None:
    error = errors.quarantined(60.0)
    assert error.status == 422 and error.kind == "server_error"
