"""The headers that pass between clients and replicas, and those that do not."""

from __future__ import annotations

from headrace.gateway.backend import ReplicaInfo
from headrace.gateway.errors import Headers
from headrace.gateway.ingress.connection import SECURITY_HEADERS
from headrace_decode.http.internal_port import (
    INTERNAL_HEADER,
    MAX_RETENTION_HEADER,
    TENANT_HEADER,
)
from headrace_decode.resume.emitted import HEADER

# Hop-by-hop headers (RFC 9110, 7.6.1), and headers that the gateway or its server writes itself.
_NOT_COPIED = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
        b"content-length",
        b"date",
        b"server",
        b"x-request-id",
        HEADER,
        *(name for name, _ in SECURITY_HEADERS),
    }
)

# Not for the replica: hop-by-hop headers (RFC 9110, 7.6.1), the client's key and origin, and
# headers that the gateway or its HTTP client writes itself.
_NOT_FORWARDED = frozenset(
    {
        b"authorization",
        b"connection",
        b"content-encoding",
        b"content-length",
        b"expect",
        b"host",
        b"keep-alive",
        b"origin",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
        b"x-api-key",
        b"x-request-id",
    }
)


def forwarded(headers: list[tuple[bytes, bytes]], request_id: bytes) -> Headers:
    """Return the client's headers that the replica gets, with the request id."""
    dropped: frozenset[bytes] = _NOT_FORWARDED
    for name, value in headers:
        if name == b"connection":
            dropped = dropped.union(each.strip().lower() for each in value.split(b","))
    kept = [head for head in headers if head[0] not in dropped and head[0][:11] != b"x-headrace-"]
    kept.append((b"x-request-id", request_id))
    return kept


def answer_headers(headers: Headers) -> Headers:
    """Return the headers of a replica's answer that the client gets."""
    return [head for head in headers if head[0] not in _NOT_COPIED]


def is_event_stream(headers: Headers) -> bool:
    """Return whether an answer is an event stream."""
    for name, value in headers:
        if name == b"content-type":
            return value.startswith(b"text/event-stream")
    return False


def token_header(replica: ReplicaInfo) -> Headers:
    """Return the header that identifies a gateway to a replica."""
    return [(INTERNAL_HEADER, replica.token.encode())]


def identity_headers(replica: ReplicaInfo, tenant: str | None) -> Headers:
    """Return the headers that identify the gateway and the tenant to a replica."""
    if tenant is None:
        return token_header(replica)
    return [*token_header(replica), (TENANT_HEADER, tenant.encode())]


def retention_headers(max_retention_s: int) -> Headers:
    """Return the header with the seconds for which a request may have KV retained; none for 0."""
    return [(MAX_RETENTION_HEADER, b"%d" % max_retention_s)] if max_retention_s else []
