"""The table of the replicas' routes, by path and method.

It holds the routes that the replicas last reported (`headrace_decode.http.public_routes`). A value
in a path, such as a response id, may have plain characters only, since the path goes to the replica
unchanged.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from headrace.gateway import errors
from headrace_decode.http.public_routes import Route

_VALUE = r"[A-Za-z0-9][A-Za-z0-9_.:-]{0,127}"
_NOTHING: dict[str, Route] = {}


class RouteTable:
    """Routes by path; immutable.

    Args:
        routes: the routes in any order; duplicates are allowed.
    """

    def __init__(self, routes: Iterable[Route] = ()) -> None:
        self.routes = frozenset(routes)
        self._exact: dict[str, dict[str, Route]] = {}
        for route in self.routes:
            self._exact.setdefault(route.path, {})[route.method] = route
        self._patterns = [
            (re.compile(_pattern(path)), by_method)
            for path, by_method in self._exact.items()
            if "{" in path
        ]

    def __bool__(self) -> bool:
        return bool(self.routes)

    def at(self, path: str) -> Mapping[str, Route]:
        """Return the routes at a path by their methods; empty if there is none."""
        if "{" in path:
            return _NOTHING
        found = self._exact.get(path)
        if found is None:
            found = next(
                (by for pattern, by in self._patterns if pattern.fullmatch(path)), _NOTHING
            )
        return found

    def refusal(self, path: str, method: str) -> errors.ApiError:
        """Return the error for a request that no replica takes: 405 if the path has other methods,
        otherwise 404."""
        methods = sorted(self.at(path))
        return errors.method_not_allowed(method, methods) if methods else errors.not_found(path)


def _pattern(path: str) -> str:
    return "/".join(_VALUE if part.startswith("{") else re.escape(part) for part in path.split("/"))
