"""Errors in OpenAI's shape: `{"error": {"message", "type", "param", "code"}}`.

Each refusal that the gateway itself makes is built here, so that a client's `except` clauses see
the same statuses and codes as with OpenAI's service. `dialect.py` writes them for the other APIs.
Errors of replicas pass through unchanged.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec

from headrace_decode.resume.emitted import STOPPING

Headers = list[tuple[bytes, bytes]]


class ApiError(Exception):
    """A refusal that is sent to the client.

    Args:
        status: the HTTP status.
        message: one sentence for a person.
        kind: OpenAI's `type`; None for that of the status: `rate_limit_error` for 429,
            `server_error` from 500 on, else `invalid_request_error`.
        code: OpenAI's `code`, for programs.
        param: the field of the request that is wrong, if one is.
        headers: more response headers.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str | None = None,
        code: str | None = None,
        param: str | None = None,
        headers: Sequence[tuple[bytes, bytes]] = (),
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        of_client = "rate_limit_error" if status == 429 else "invalid_request_error"
        self.kind = kind or ("server_error" if status >= 500 else of_client)
        self.code = code
        self.param = param
        self.headers: Headers = list(headers)

    def document(self) -> dict[str, Any]:
        """Return the error in OpenAI's shape."""
        error = {
            "message": self.message,
            "type": self.kind,
            "param": self.param,
            "code": self.code,
        }
        return {"error": error}

    def body(self) -> bytes:
        """Return the document as JSON."""
        return msgspec.json.encode(self.document())


def invalid_api_key() -> ApiError:
    """401: no key, or one that is not ours."""
    return ApiError(
        401,
        "Incorrect or missing API key. Send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'.",
        code="invalid_api_key",
        headers=[(b"www-authenticate", b"Bearer")],
    )


def key_is_busy(name: str, maximum: int) -> ApiError:
    """429: the key has its maximum number of requests under way."""
    return ApiError(
        429,
        f"The key '{name}' has {maximum} requests under way, which is its limit.",
        code="rate_limit_exceeded",
        headers=[(b"retry-after", b"1")],
    )


def key_is_too_fast(name: str, maximum: int, wait_s: float) -> ApiError:
    """429: the key has sent its maximum number of requests a minute."""
    return ApiError(
        429,
        f"The key '{name}' may send {maximum} requests a minute.",
        code="rate_limit_exceeded",
        headers=[(b"retry-after", b"%d" % max(1, round(wait_s + 0.5)))],
    )


def not_an_admin(path: str, *, keys_on: bool) -> ApiError:
    """403: only an administrator may do this.

    Args:
        keys_on: whether API keys are configured; without them, clients on this machine administer.
    """
    who = "a key with the role admin" if keys_on else "a client on the gateway's own machine"
    return ApiError(403, f"{path} needs {who}.", code="admin_only")


def not_found(path: str) -> ApiError:
    """404: no such route."""
    text = f"There is nothing at {path[:200]}."
    if path in ("/docs", "/redoc"):
        text += (
            " /openapi.json describes the routes, docs/rest.md in words; /console is a web page."
        )
    return ApiError(404, text, code="not_found")


def model_not_found(model: str) -> ApiError:
    """404: no such model."""
    return ApiError(
        404, f"The model '{model[:200]}' does not exist.", code="model_not_found", param="model"
    )


def no_model_named() -> ApiError:
    """400: the request names no model, and there are several."""
    return ApiError(
        400,
        "The request names no model; /v1/models lists those that there are.",
        code="missing_required_parameter",
        param="model",
    )


def plan_not_found(request_id: str) -> ApiError:
    """404: no plan is stored under this request id."""
    return ApiError(
        404,
        f"No plan is known for request '{request_id[:128]}': only the last ones are kept.",
        code="plan_not_found",
        param="request_id",
    )


def method_not_allowed(method: str, allowed: Sequence[str]) -> ApiError:
    """405, with the methods that are allowed."""
    allow = ", ".join(allowed)
    return ApiError(
        405,
        f"{method[:20]} is not possible here; use {allow}.",
        code="method_not_allowed",
        headers=[(b"allow", allow.encode())],
    )


def bad_field(field: str, what: str) -> ApiError:
    """400: a field of an administrative request is wrong."""
    return ApiError(400, f"{field} {what}.", code="invalid_value", param=field)


def not_json(fault: str) -> ApiError:
    """400: the body is no JSON object."""
    return ApiError(400, f"The request body is not a JSON object: {fault}.", code="invalid_json")


def body_timeout(limit_s: float) -> ApiError:
    """408: the client did not finish its request."""
    return ApiError(
        408,
        f"The request body did not arrive within {limit_s:g} s.",
        code="request_timeout",
        headers=[(b"connection", b"close")],
    )


def body_too_large(limit_bytes: int) -> ApiError:
    """413: a body over the limit."""
    return ApiError(
        413, f"The request body is larger than {limit_bytes} bytes.", code="request_too_large"
    )


def too_many_requests(limit: int) -> ApiError:
    """429: all places are taken."""
    return ApiError(
        429,
        f"{limit} requests are in progress, which is the limit. Try again shortly.",
        code="too_many_requests",
        headers=[(b"retry-after", b"1")],
    )


def no_tenants() -> ApiError:
    """400: the request names a tenant, but no keys are configured."""
    return ApiError(
        400,
        "tenant: no keys are configured, so there are no tenants; leave it out",
        code="invalid_value",
        param="tenant",
    )


def unknown_class(why: str, param: str) -> ApiError:
    """400: the request names an SLO class that it cannot have."""
    return ApiError(400, why, code="unknown_slo_class", param=param)


def wrong_technique(why: str, param: str) -> ApiError:
    """400: the request's fields for lossy techniques are wrong."""
    return ApiError(400, why, code="invalid_technique", param=param)


def too_late(slo: str, target_s: float, wait_s: float, retry_after_s: float) -> ApiError:
    """429: the first token is predicted to come after the class's target."""
    return _overloaded(
        f"The queue is about {wait_s:.1f} s long, so a request of the class '{slo}' would have no "
        f"first token within {target_s:g} s. Try again later.",
        retry_after_s,
    )


def queue_full(retry_after_s: float) -> ApiError:
    """429: the queue has its maximum number of requests."""
    return _overloaded("The queue is full. Try again later.", retry_after_s)


def waited_too_long(slo: str, waited_s: float) -> ApiError:
    """429: an admitted request waited past its deadline, because replicas were slower than
    predicted."""
    return _overloaded(
        f"The request waited {waited_s:.1f} s in the queue, longer than the class '{slo}' allows.",
        1.0,
    )


def _overloaded(message: str, retry_after_s: float) -> ApiError:
    return ApiError(
        429,
        message,
        code="overloaded",
        headers=[(b"retry-after", b"%d" % max(1, math.ceil(retry_after_s)))],
    )


def bodies_full(limit_bytes: int) -> ApiError:
    """429: the request bodies in progress fill their budget."""
    return _no_room(f"The request bodies in progress hold {limit_bytes} bytes, which is the limit.")


def tenants_bodies_full(held_bytes: int) -> ApiError:
    """429: the remaining budget for request bodies is reserved for other tenants."""
    return _no_room(
        f"Your request bodies in progress hold {held_bytes} bytes, which is your tenant's share of "
        "the buffer for request bodies."
    )


def _no_room(why: str) -> ApiError:
    return ApiError(
        429,
        f"{why} Try again shortly.",
        code="bodies_too_large",
        headers=[(b"retry-after", b"1"), (b"connection", b"close")],
    )


def internal_error() -> ApiError:
    """500: a fault of the gateway."""
    return ApiError(500, "The gateway failed on this request.", code="internal_error")


def error_too_long(status: int, limit_bytes: int) -> ApiError:
    """Return an error with the replica's own status, in place of its explanation, which is too
    long."""
    return ApiError(
        status,
        f"The replica explained its error with more than {limit_bytes} bytes, which are left out. "
        "Send fewer or smaller items to learn which one is wrong.",
        code="error_too_long",
    )


def host_not_allowed(host: str) -> ApiError:
    """403: the request's `Host` is not a name of this endpoint."""
    return ApiError(
        403,
        f"The host '{host[:200]}' is not a name of this endpoint. Without API keys the endpoint "
        "answers only to IP addresses, names of local networks and gateway.allowed_hosts, so that "
        "no web page can use it through a name of its own.",
        code="host_not_allowed",
    )


def encoding_not_supported(encoding: str) -> ApiError:
    """415: the body is compressed."""
    return ApiError(
        415,
        f"Content-Encoding '{encoding[:100]}' is not supported. Send the body uncompressed.",
        code="unsupported_content_encoding",
        headers=[(b"accept-encoding", b"identity")],
    )


def replica_lost(when: str) -> ApiError:
    """502, or the last event of a stream: the replica that worked on the request died."""
    return ApiError(
        502,
        f"The replica died {when}. Send the request again.",
        code="replica_lost",
    )


def bad_resume(body_bytes: int) -> ApiError:
    """400: the header that resumes a stream does not fit the body."""
    return ApiError(
        400,
        "x-headrace-resume: must be a number of bytes, 0 for a new stream and at most "
        f"{body_bytes}, the length of this body.",
        param="x-headrace-resume",
        code="invalid_value",
    )


def cannot_resume(why: str) -> ApiError:
    """409: the stream cannot be resumed after the part that the client has."""
    return ApiError(
        409, f"This stream cannot be resumed: {why}. Send a new request.", code="cannot_resume"
    )


def quarantined(left_s: float) -> ApiError:
    """422: the same request killed several replicas."""
    return ApiError(
        422,
        "This request was given to several replicas, and each died while it worked on it. It is "
        f"not tried again for {left_s:.0f} s.",
        kind="server_error",
        code="request_quarantined",
    )


def stopping() -> ApiError:
    """503, or the last event of a stream: the gateway is shutting down and the drain period is
    over."""
    return ApiError(
        503,
        "The gateway is shutting down and the drain period is over. Send the request again.",
        code=STOPPING,
        headers=[(b"retry-after", b"1"), (b"connection", b"close")],
    )


def no_replica(waited_s: float) -> ApiError:
    """503: no replica became ready in time."""
    return ApiError(
        503,
        f"No replica was ready within {waited_s:g} s.",
        code="no_replica_ready",
        headers=[(b"retry-after", b"5")],
    )


def request_timeout(limit_s: float) -> ApiError:
    """504, or the last event of a stream: the whole request took too long."""
    return ApiError(
        504,
        f"The request was not finished within {limit_s:g} s.",
        code="request_timeout",
        headers=[(b"connection", b"close")],
    )
