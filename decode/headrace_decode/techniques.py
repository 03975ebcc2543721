"""Reads from a request which lossy techniques may change its KV.

A request's `vllm_xargs` have these fields:

    techniques: "auto"    the techniques that the app is configured for; the default
    techniques: "off"     exact KV only

    reuse: "auto"         allow stored KV to be reused at other positions (docs/reuse.md)
    reuse: "off"          forbid it
    reuse: 0.3            allow it, and compute this share of the reused KV again

    sparse: "auto"        allow answer tokens to attend to a part of the KV (docs/sparse.md)
    sparse: "off"         attend to all of the KV
    sparse: 0.2           attend to this share of the KV

    bounded: "auto"       allow a part of a long prompt's KV to be dropped (docs/bounded.md)
    bounded: "off"        keep all of the KV
    bounded: 0.25         keep this share of the KV

If a request has no `reuse`, `sparse` or `bounded`, the app's `techniques.NAME.mode` decides. The
gateway reads the fields to refuse invalid values and to report the applied techniques. The decode
replica reads them again, since not every request comes through a gateway.

Four techniques exist: a store with a lossy codec, reuse, sparse attention, and bounded contexts. If
the app has such a store, a request with "off" gets a cache salt under the mark `EXACT`
(`headrace_kvstore.salts`), here and at the replica that prefills for it. The prompts of sparse and
bounded requests are computed exactly and shared like any others. Blocks with tokens of their
answers are private (`headrace_engine.private_kv`), as are blocks of reused KV. Contexts that drop
KV while they are computed share nothing (`bounded.engine.streams`). Sparse and bounded requests
reuse nothing, and no request is both.

If an engine does not support a technique, it serves requests as if they had not asked for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from headrace_kvstore.salts import EXACT, is_marked, marked

FIELD = "techniques"
PARAM = f"vllm_xargs.{FIELD}"
REUSE = "reuse"
SPARSE = "sparse"
BOUNDED = "bounded"
MODES = ("off", "request", "auto")
"""Modes of a technique in an app: never, for requests that ask, for all that do not refuse."""
HEADER = b"x-headrace-techniques"
"""Header of an answer with the techniques that could change its KV, or `exact`."""


class TechniqueError(ValueError):
    """Error: a request has an invalid value in a field for techniques.

    Attributes:
        param: the field with the invalid value.
    """

    def __init__(self, why: str, param: str) -> None:
        super().__init__(why)
        self.param = param


def wants_exact(extra: object) -> bool:
    """Return whether a request with these `vllm_xargs` wants exact KV only.

    Raises:
        TechniqueError: the field is neither "auto" nor "off".
    """
    value = extra.get(FIELD, "auto") if isinstance(extra, Mapping) else "auto"
    if value not in ("auto", "off"):
        raise TechniqueError(f'{PARAM} must be "auto" or "off".', PARAM)
    return bool(value == "off")


def reuse_share(extra: object, mode: str, default: float) -> float | None:
    """Return the share of reused KV to compute again; None if the request may reuse nothing.

    Args:
        extra: the request's `vllm_xargs`.
        mode: the app's mode, one of `MODES`.
        default: share if the request names none.

    Raises:
        TechniqueError: one of the fields is invalid.
    """
    return _share(REUSE, extra, mode, default)


class Apart(NamedTuple):
    """The technique of a request whose answer attends to only a part of its KV, and its share.

    The share is the part that answer tokens attend to (sparse), or that is kept (bounded).
    """

    technique: str
    share: float


def apart_of(extra: object, modes: Mapping[str, tuple[str, float]]) -> Apart | None:
    """Return whether a request uses sparse attention or bounded contexts; None for neither.

    Args:
        extra: the request's `vllm_xargs`.
        modes: mode and default share of `SPARSE` and `BOUNDED` in the app, as far as the app has
            these techniques.

    Raises:
        TechniqueError: one of the fields is invalid, or the request asks for both techniques.
    """
    asked = extra if isinstance(extra, Mapping) else {}
    found = {
        name: share
        for name in (SPARSE, BOUNDED)
        if (share := _share(name, extra, *modes.get(name, ("off", 1.0)))) is not None
    }
    named = [name for name in found if name in asked]
    if len(named) == 2:
        raise TechniqueError(f"{SPARSE} and {BOUNDED} exclude each other.", f"vllm_xargs.{BOUNDED}")
    chosen = named or list(found)
    return Apart(chosen[0], found[chosen[0]]) if chosen else None


def _share(field: str, extra: object, mode: str, default: float) -> float | None:
    exact, param = wants_exact(extra), f"vllm_xargs.{field}"
    value = extra.get(field) if isinstance(extra, Mapping) else None
    share = default
    if isinstance(value, int | float) and not isinstance(value, bool):
        if not 0 < value <= 1:
            raise TechniqueError(f"{param} must be above 0 and at most 1.", param)
        share = float(value)
    elif value not in (None, "auto", "off"):
        raise TechniqueError(f'{param} must be "auto", "off" or a share.', param)
    asked = mode == "auto" if value is None else value != "off"
    return share if asked and mode != "off" and not exact else None


def exact_of(request: Mapping[str, Any]) -> bool:
    """Return whether a request's decoded body asks for exact KV only.

    Raises:
        TechniqueError: the field is neither "auto" nor "off"; or it is "off" in a beam search,
            whose steps vLLM sends to the engine without the field.
    """
    exact = wants_exact(request.get("vllm_xargs"))
    if exact and request.get("use_beam_search"):
        raise TechniqueError(f'{PARAM} cannot be "off" in a beam search.', PARAM)
    return exact


def share_in(params: Any, technique: str) -> float | None:
    """Return one technique's share in the extra arguments of an engine request's parameters.

    Returns:
        The share, below 1; None if the request uses all of its KV or has no parameters.
    """
    value = ((params and params.extra_args) or {}).get(technique)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1:
        return None
    return float(value)


def salt_for(salt: str, extra: object, lossy: str) -> str:
    """Return the cache salt under which a request's KV is shared.

    The salt changes only if the request wants exact KV and the store is lossy.

    Args:
        salt: salt made from the tenant's and the client's (`headrace_kvstore.salts.salt_of`).
        extra: the request's `vllm_xargs`.
        lossy: the technique of the app's store; empty if the store is exact.

    Raises:
        TechniqueError: the field is invalid, or the client's salt begins like a marked one.
    """
    if is_marked(salt):
        raise TechniqueError('cache_salt must not begin with "technique:".', "cache_salt")
    return marked(salt, EXACT) if wants_exact(extra) and lossy else salt


@dataclass(frozen=True)
class Asked:
    """The techniques that a request allows or refuses; None leaves one to the app.

    Attributes:
        exact: whether the request wants exact KV only.
        reuse, sparse, bounded: whether the request allows these techniques.
    """

    exact: bool = False
    reuse: bool | None = None
    sparse: bool | None = None
    bounded: bool | None = None


def asked_of(request: Mapping[str, Any]) -> Asked:
    """Read the techniques from a request's decoded body.

    Raises:
        TechniqueError: `exact_of`, `reuse_share` or `apart_of` refuses a field.
    """
    extra = request.get("vllm_xargs")
    apart_of(extra, {name: ("request", 0.5) for name in (SPARSE, BOUNDED)})
    return Asked(exact_of(request), *(_allows(name, extra) for name in (REUSE, SPARSE, BOUNDED)))


def _allows(field: str, extra: object) -> bool | None:
    if _share(field, extra, "request", 1.0) is not None:
        return True
    return None if _share(field, extra, "auto", 1.0) is not None else False


def offered(lossy: str, modes: Mapping[str, str]) -> str:
    """Return a replica's techniques in the form that gateways pass to `applied`.

    Args:
        lossy: the technique of the store; empty if the store is exact.
        modes: the modes of `REUSE`, `SPARSE` and `BOUNDED`.
    """
    told = [f"{name}={mode}" for name, mode in modes.items() if mode != "off"]
    return ", ".join(filter(None, (lossy, *told)))


def applied(asked: Asked, offer: str) -> str:
    """Return the value of `HEADER` for an answer.

    It is known before the first token, so it names the techniques that could be used.

    Args:
        asked: the techniques that the request allows or refuses.
        offer: the replica's techniques, from `offered`.
    """
    if asked.exact:
        return "exact"
    told = []
    wanted = {REUSE: asked.reuse, SPARSE: asked.sparse, BOUNDED: asked.bounded}
    for one in filter(None, offer.split(", ")):
        name, _, mode = one.partition("=")
        if name not in wanted:
            told.append(one)
        elif mode == "auto" if wanted[name] is None else wanted[name]:
            told.append(name)
    # A sparse or bounded request reuses nothing; a technique that it asked for takes precedence.
    apart = sorted((n for n in (SPARSE, BOUNDED) if n in told), key=lambda name: not wanted[name])
    if apart:
        told = [name for name in told if name not in wanted] + apart[:1]
    return ", ".join(told) or "exact"
