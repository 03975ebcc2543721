"""Keeps the names that clients give to their media apart by tenant.

A part of a message may name its picture, sound or film by `uuid`. vLLM takes that name for the
media's hash: in its caches of processed media and of encoders, and in the hashes of KV blocks. So a
client could get another's picture by its name, or put another picture under it. After this every
name is a tenant's own. (A name in a picture's EXIF data counts for vLLM only if its type is
`uuid.UUID`, which no file can hold.)

Pure: bytes in, bytes out.
"""

from __future__ import annotations

import hashlib
import json

_PLACES = ("messages", "input", "prompt")
"""Fields of requests that may hold media."""
_SIGNS = (b"uuid", b"\\u0075", b"\\u0069", b"\\u0064")
"""One of these is in a body that has the key, however its letters are written."""


def scoped(body: bytes, tenant: str) -> bytes:
    """A request's body with the tenant's digest before the name of each of its media; as it is if
    it names none."""
    if not any(sign in body for sign in _SIGNS):
        return body
    try:
        request = json.loads(body)
    except (ValueError, RecursionError):
        return body  # vLLM tells what is wrong
    if not isinstance(request, dict):
        return body
    digest = hashlib.blake2b(tenant.encode(), digest_size=16).hexdigest()
    left = [request.get(place) for place in _PLACES]
    found = False
    while left:
        value = left.pop()
        if isinstance(value, list):
            left.extend(value)
        elif isinstance(value, dict):
            left.extend(value.values())
            if isinstance(name := value.get("uuid"), str):
                value["uuid"], found = f"{digest}-{name}", True
    return json.dumps(request, separators=(",", ":")).encode() if found else body
