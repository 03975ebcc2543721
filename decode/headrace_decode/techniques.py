"""What a request says about lossy techniques: which of them may touch its KV.

In a request's `vllm_xargs`:

    techniques: "auto"    what the app is configured for; the default
    techniques: "off"     exact KV only

    reuse: "auto"         stored KV may be reused at other places of the prompt (docs/reuse.md)
    reuse: "off"          it may not
    reuse: 0.3            it may, and this share of it is computed again

Without `reuse` the app's `techniques.reuse.mode` decides. The gateway reads both to refuse what is
wrong and to tell what applied; the decode replica reads them again, since not every path leads
through a gateway. Two techniques exist: a store with a lossy codec, and reuse. A request with "off"
in an app with such a store gets a cache salt under the mark `EXACT` (`headrace_kvstore.salts`),
here and at the replica that prefills for it; one whose KV is reused gets a mark of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace_kvstore.salts import EXACT, is_marked, marked

FIELD = "techniques"
PARAM = f"vllm_xargs.{FIELD}"
REUSE = "reuse"
REUSE_PARAM = f"vllm_xargs.{REUSE}"
MODES = ("off", "request", "auto")
"""Of reuse in an app: never, for requests that ask, for all that do not refuse."""
HEADER = b"x-headrace-techniques"
"""In an answer: the techniques that could touch its KV, or `exact`."""


class TechniqueError(ValueError):
    """A request says what there is not.

    Attributes:
        param: the field that is wrong.
    """

    def __init__(self, why: str, param: str) -> None:
        super().__init__(why)
        self.param = param


def wants_exact(extra: object) -> bool:
    """Whether a request with these `vllm_xargs` wants exact KV only.

    Raises:
        TechniqueError: the field is neither "auto" nor "off".
    """
    value = extra.get(FIELD, "auto") if isinstance(extra, Mapping) else "auto"
    if value not in ("auto", "off"):
        raise TechniqueError(f'{PARAM} must be "auto" or "off".', PARAM)
    return bool(value == "off")


def reuse_share(extra: object, mode: str, default: float) -> float | None:
    """Share of reused KV that a request wants computed again; None if nothing may be reused.

    Args:
        extra: the request's `vllm_xargs`.
        mode: of `MODES`.
        default: share where the request names none.

    Raises:
        TechniqueError: one of the fields is wrong.
    """
    exact = wants_exact(extra)
    value = extra.get(REUSE) if isinstance(extra, Mapping) else None
    share = default
    if isinstance(value, int | float) and not isinstance(value, bool):
        if not 0 < value <= 1:
            raise TechniqueError(f"{REUSE_PARAM} must be above 0 and at most 1.", REUSE_PARAM)
        share = float(value)
    elif value not in (None, "auto", "off"):
        raise TechniqueError(f'{REUSE_PARAM} must be "auto", "off" or a share.', REUSE_PARAM)
    asked = mode == "auto" if value is None else value != "off"
    return share if asked and mode != "off" and not exact else None


def exact_of(request: Mapping[str, Any]) -> bool:
    """The same of a request's decoded body.

    Raises:
        TechniqueError: as `wants_exact`; or the request is a beam search, whose steps vLLM sends to
            the engine without the field.
    """
    exact = wants_exact(request.get("vllm_xargs"))
    if exact and request.get("use_beam_search"):
        raise TechniqueError(f'{PARAM} cannot be "off" in a beam search.', PARAM)
    return exact


def salt_for(salt: str, extra: object, lossy: str) -> str:
    """The cache salt under which a request's KV is shared; unchanged unless a technique matters.

    Args:
        salt: the tenant's and the client's (`headrace_kvstore.salts.salt_of`).
        extra: the request's `vllm_xargs`.
        lossy: what the app's store applies; empty if it is exact.

    Raises:
        TechniqueError: the field is wrong, or the client's salt looks marked.
    """
    if is_marked(salt):
        raise TechniqueError('cache_salt must not begin with "technique:".', "cache_salt")
    return marked(salt, EXACT) if wants_exact(extra) and lossy else salt


def may_reuse(request: Mapping[str, Any]) -> bool | None:
    """Whether a request's decoded body allows reuse; None if it leaves that to the app.

    Raises:
        TechniqueError: as `reuse_share`.
    """
    extra = request.get("vllm_xargs")
    if reuse_share(extra, "request", 1.0) is not None:
        return True
    return None if reuse_share(extra, "auto", 1.0) is not None else False


def offered(lossy: str, mode: str) -> str:
    """What a replica tells gateways, for `applied`: what its store applies, and how it reuses."""
    return ", ".join(filter(None, (lossy, "" if mode == "off" else f"{REUSE}={mode}")))


def applied(exact: bool, offer: str, reuse: bool | None = None) -> str:
    """What `HEADER` says. It is known before the first token, so it tells what could be used.

    Args:
        exact: the request wants exact KV only.
        offer: the replica's, as `offered`.
        reuse: of the request, as `may_reuse`.
    """
    if exact:
        return "exact"
    told = []
    for one in filter(None, offer.split(", ")):
        name, _, mode = one.partition("=")
        if name != REUSE:
            told.append(one)
        elif mode == "auto" if reuse is None else reuse:
            told.append(REUSE)
    return ", ".join(told) or "exact"
