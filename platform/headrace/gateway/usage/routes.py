"""The routes of usage: sums by tenant and model, and the usage of one request.

An administrator sees all tenants; any other key sees its own.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any
from urllib.parse import parse_qsl

import msgspec

from headrace.gateway.asgi import JSON_TYPE
from headrace.gateway.backend import ModelBackend
from headrace.gateway.body_reader import BodyReader
from headrace.gateway.errors import ApiError, bad_field
from headrace.gateway.kept_records.record_store import StoreError
from headrace.gateway.request_context import RequestContext
from headrace.gateway.usage.ledger import UsageLedger
from headrace_engine.usage.request_usage import NAMES, RequestUsage, usage_of_dict

USAGE = "/headrace/v1/usage"
READS = ("GET", "HEAD")
DEFAULT_S = 86_400.0
"""Period of a request that names none, in seconds."""
FIELDS = ("since", "until", "tenant", "model")
MAX_QUERY_FIELDS = 16


class UsageRoutes:
    """The handlers of the routes.

    Args:
        ledger: the sums; None if none are kept.
        backends: the replicas of each model.
        body_reader: knows who may administer.
    """

    def __init__(
        self,
        ledger: UsageLedger | None,
        backends: Sequence[ModelBackend],
        body_reader: BodyReader,
    ) -> None:
        self._ledger, self._backends = ledger, tuple(backends)
        self._body_reader = body_reader

    def has(self, path: str) -> bool:
        """Return whether a path is one of these routes'."""
        return path == USAGE or (path.startswith(USAGE + "/") and len(path) > len(USAGE) + 1)

    async def handle(self, context: RequestContext) -> None:
        """Answer a request."""
        context.allow_methods(*READS)
        self._body_reader.limit_answer_time(context)
        tenant = self._tenant(context)
        if context.path == USAGE:
            document = await self._sums(context.call.target, tenant)
        else:
            document = await self._request(context.path[len(USAGE) + 1 :], tenant)
        await context.answer(200, msgspec.json.encode(document), JSON_TYPE)

    def _tenant(self, context: RequestContext) -> str | None:
        """Return the tenant whose usage the request may see; None for all.

        Raises:
            ApiError: 403, without keys the client is not on the gateway's machine.
        """
        if context.may_administer:
            return None
        if context.call.tenant is None:
            self._body_reader.check_admin(context)
        return context.call.tenant

    async def _sums(self, target: str, own: str | None) -> dict[str, Any]:
        if self._ledger is None:
            raise ApiError(
                404, "No usage is kept: gateway.usage.enabled is false.", code="no_usage"
            )
        wanted, now_s = _query(target), time.time()
        until_s = _time("until", wanted.get("until"), now_s, now_s)
        since_s = _time("since", wanted.get("since"), until_s - DEFAULT_S, now_s)
        if since_s > until_s:
            raise bad_field("since", "must not be later than until")
        tenant = wanted.get("tenant", own)
        if own is not None and tenant != own:
            raise ApiError(403, f"This key sees the usage of {own} only.", code="other_tenant")
        try:
            sums = await self._ledger.sums(since_s, until_s, tenant, wanted.get("model"))
        except StoreError as error:
            raise ApiError(
                503, f"The usage ledger cannot be used: {error}.", code="usage_unavailable"
            ) from error
        return {
            "since": _iso(since_s // 3600 * 3600),
            "until": _iso(min(now_s, until_s // 3600 * 3600 + 3600)),
            "usage": [
                {"tenant": one.tenant, "model": one.model, **_all_quantities(one.usage)}
                for one in sums
            ],
        }

    async def _request(self, request_id: str, tenant: str | None) -> dict[str, Any]:
        parts = [part for each in self._backends for part in await each.usage(request_id, tenant)]
        if not parts:
            raise ApiError(
                404,
                f"No usage is known for request '{request_id[:128]}': replicas keep that of their "
                "last requests.",
                code="usage_not_found",
                param="request_id",
            )
        total = RequestUsage()
        for part in parts:
            total.add(usage_of_dict(part["usage"]))
        return {
            "request_id": request_id,
            "complete": all(part["complete"] for part in parts),
            "usage": _all_quantities(total),
            "parts": parts,
        }


def _all_quantities(usage: RequestUsage) -> dict[str, float]:
    values = dict(zip(NAMES, usage.values(), strict=True))
    return {**values, "engine_s": round(usage.engine_s, 6)}


def _query(target: str) -> Mapping[str, str]:
    """Return the fields of a request's query.

    Raises:
        ApiError: 400, a field is unknown or twice.
    """
    try:
        pairs = parse_qsl(
            target.partition("?")[2], keep_blank_values=True, max_num_fields=MAX_QUERY_FIELDS
        )
    except ValueError:
        raise bad_field("query", f"may have at most {MAX_QUERY_FIELDS} fields") from None
    for name, _ in pairs:
        if name not in FIELDS:
            raise bad_field("query", f"may have {', '.join(FIELDS)} and nothing else")
    if len(pairs) > len(dict(pairs)):
        raise bad_field("query", "may have each field once")
    return dict(pairs)


def _time(name: str, given: str | None, default_s: float, now_s: float) -> float:
    """Return a time in Unix seconds.

    Args:
        given: ISO 8601 (UTC if it names no zone), Unix seconds, or a time before now such as `24h`.

    Raises:
        ApiError: 400, it is none of these.
    """
    if given is None:
        return default_s
    try:
        found = time_of(given, now_s)
    except ValueError:
        raise bad_field(
            name,
            f"must be like 2026-11-01, 2026-11-01T12:00, 24h, 7d or Unix seconds, got "
            f"'{given[:40]}'",
        ) from None
    return found


def time_of(text: str, now_s: float) -> float:
    """Return the Unix seconds of a time: ISO 8601, Unix seconds, or `24h`, `7d` before now.

    Raises:
        ValueError: it is none of these.
    """
    units = {"m": 60.0, "h": 3600.0, "d": 86_400.0, "w": 604_800.0}
    if text[-1:] in units and text[:-1].isascii() and text[:-1].isdigit() and len(text) < 12:
        found = now_s - int(text[:-1]) * units[text[-1]]
    elif text.isascii() and text.isdigit() and 9 <= len(text) <= 11:
        found = float(text)
    else:
        moment = datetime.fromisoformat(text)
        found = (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    return min(max(0.0, found), 1e11)


def _iso(unix_s: float) -> str:
    return datetime.fromtimestamp(min(unix_s, 2e11), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
