"""Adds the tenant to the names that clients give to their media.

A part of a message may name its picture, sound or film by `uuid`. vLLM uses that name as the
media's hash: in its caches of processed media and of encoders, and in the hashes of KV blocks. A
client could therefore get another client's picture by its name, or store another picture under the
name. With this change, every name belongs to one tenant. (vLLM uses a name in a picture's EXIF data
only if its type is `uuid.UUID`, which no file can hold.)

Pure: bytes in, bytes out.
"""

from __future__ import annotations

import hashlib
import json

_PLACES = ("messages", "input", "prompt")
"""Fields of requests that may hold media."""
_SIGNS = (b"uuid", b"\\u0075", b"\\u0069", b"\\u0064")
"""Byte strings of which a body with the key `uuid` contains one, however its letters are written.
"""


def with_scoped_media(body: bytes, tenant: str) -> bytes:
    """Return a request's body with the tenant's digest before the name of each of its media.

    A body that names no media is returned unchanged.
    """
    if not any(sign in body for sign in _SIGNS):
        return body
    try:
        request = json.loads(body)
    except (ValueError, RecursionError):
        return body  # vLLM reports the error
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
