"""The few requests that the object tier makes, with a name for each way in which they fail.

The client is obstore (Apache Arrow's object_store): S3 and compatible stores, `gs://`, `az://`,
a folder (`file:///...`), and memory (`memory:///`, for tests). Each request has a time limit and at
most one more try. An answer lands in memory of its own, so a late one overwrites nothing.

NIXL 1.3.2 has a plugin for S3, OBJ, which works against the same servers. It was left out after a
trial. It cannot list or delete. It has no time limit, so an endpoint that hangs keeps arena memory
for a minute, also after its handle was released. It reports a read past an object's end as done.
And it was no faster, though this client also compares checksums (docs/kvstore-peers.md).
"""

from __future__ import annotations

import builtins
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

LIST_CHUNK = 1000
CONNECT_S = 3.0
_DENIED = ("PermissionDeniedError", "UnauthenticatedError", "PermissionError")
_NO_RANGE = re.compile(r"range was invalid|Invalid range")


class ObjectError(Exception):
    """Failure of a request. `reason`: "absent", "denied", "timeout", "unreachable" or "failed"."""

    def __init__(self, reason: str, text: str = "") -> None:
        super().__init__(f"{reason}: {text}" if text else reason)
        self.reason = reason


class Listed(NamedTuple):
    """One object. `modified_s`: seconds of the server's time.time(). `tag`: the entity tag of this
    version; empty if the server gives none."""

    name: str
    size_bytes: int
    modified_s: float
    tag: str = ""


class StoreClient:
    """Client of obstore below one URL, with names relative to it. Thread-safe. Requests raise
    ObjectError.

    Args:
        url: such as `s3://bucket/prefix`. Credentials, region and endpoint come from the usual
            environment (`AWS_ACCESS_KEY_ID`, `AWS_ENDPOINT_URL`, ...) or from instance metadata.
        options: obstore's own, which win over the environment: `endpoint`, `region`, ...
        timeout_s: of one request.

    Raises:
        ImportError: obstore is not installed (`pip install headrace[object]`).
        ValueError: no URL or option that obstore knows.
    """

    def __init__(self, url: str, options: Mapping[str, Any], timeout_s: float) -> None:
        from obstore.exceptions import BaseError
        from obstore.store import from_url

        known: dict[str, Any] = dict(options)
        if url.startswith("file:"):
            known.setdefault("mkdir", True)
        elif not url.startswith("memory:"):
            limit = timedelta(seconds=timeout_s)
            connect = timedelta(seconds=min(CONNECT_S, timeout_s))
            plain = str(known.get("endpoint", "")).startswith("http:")
            known["client_options"] = {
                "timeout": limit,
                "connect_timeout": connect,
                "allow_http": bool(known.pop("allow_http", plain)),
            }
            known["retry_config"] = {"max_retries": 1, "retry_timeout": limit}
        try:
            self._store: Any = from_url(url, **known)
        except (BaseError, TypeError, ValueError) as error:
            raise ValueError(f"{url}: {str(error).splitlines()[0]}") from error

    def list(self, after: str = "", prefix: str = "") -> Iterator[Listed]:
        """Iterate over all objects, or over those whose names follow `after`.

        Args:
            prefix: list only what lies below this path, such as `a/b`.
        """
        try:
            for chunk in self._store.list(
                prefix or None, offset=after or None, chunk_size=LIST_CHUNK
            ):
                for meta in chunk:
                    modified_s = meta["last_modified"].timestamp()
                    yield Listed(meta["path"], meta["size"], modified_s, meta["e_tag"] or "")
        except Exception as error:
            raise named(error) from error

    def get(self, name: str, offset: int, length: int) -> memoryview:
        """Return these bytes, or as many of them as there are."""
        try:
            return memoryview(self._store.get_range(name, start=offset, length=length))
        except Exception as error:
            raise named(error) from error

    def put(self, name: str, data: memoryview) -> None:
        """Make an object, whole or not at all."""
        try:
            self._store.put(name, data, use_multipart=False)
        except Exception as error:
            raise named(error) from error

    def create(self, name: str, data: memoryview) -> bool:
        """Make an object unless it exists (`If-None-Match: *`); return whether this call made it.

        A request that was tried twice may have made the object and return False.
        """
        try:
            self._store.put(name, data, use_multipart=False, mode="create")
        except Exception as error:
            if type(error).__name__ == "AlreadyExistsError":
                return False
            raise named(error) from error
        return True

    def delete(self, names: Sequence[str]) -> None:
        """Remove objects; those that are not there are no error."""
        try:
            self._store.delete(builtins.list(names))
        except FileNotFoundError:  # a folder stops at the first one that is missing
            for name in names if len(names) > 1 else ():
                self.delete([name])
        except Exception as error:
            raise named(error) from error


def named(error: Exception) -> ObjectError:
    """Return an ObjectError with the reason of obstore's error, from its text where its type does
    not tell."""
    text = str(error)
    status = re.search(r"status code: (\d{3})", text)
    code = int(status[1]) if status else 0
    if isinstance(error, FileNotFoundError) or code in (404, 416) or _NO_RANGE.search(text):
        reason = "absent"
    elif code in (401, 403) or type(error).__name__ in _DENIED:
        reason = "denied"
    elif "kind: Timeout" in text:
        reason = "timeout"
    elif "kind: Connect" in text:
        reason = "unreachable"
    else:
        reason = "failed"
    return ObjectError(reason, text.split("\n\n", 1)[0][:300])
