"""Reads from a request which lossy techniques may change its KV.

A request's `vllm_xargs` have these fields:

    techniques: "auto"    the techniques that the app is configured for; the default
    techniques: "off"     exact KV only

    blending: "auto"      allow stored KV to be blended at other positions (docs/blending.md)
    blending: "off"       forbid it
    blending: 0.3         allow it, and recompute this part of the blended KV

    sparse: "auto"        allow answer tokens to attend to a part of the KV (docs/sparse.md)
    sparse: "off"         attend to all of the KV
    sparse: 0.2           attend to this part of the KV

    compression: "auto"   allow a part of a long prompt's KV to be dropped (docs/compression.md)
    compression: "off"    keep all of the KV
    compression: 0.25     keep this part of the KV

If a request has no `blending`, `sparse` or `compression`, the app's `techniques.NAME.mode` decides.
The gateway reads the fields to refuse invalid values and to report the applied techniques. The
decode replica reads them again, since not every request comes through a gateway.

Four techniques exist: a store with a lossy codec, KV blending, sparse attention, and KV cache
compression. If the app has such a store, a request with "off" gets a cache salt in the isolation
namespace `EXACT` (`headrace_kvstore.identity.salts`), here and at the replica that prefills for it.
The prompts of sparse and compressed requests are computed exactly and shared like any others.
Blocks with tokens of their answers are private (`headrace_engine.vllm.private_blocks`), as are
blocks of blended KV. Contexts that drop KV while they are computed share nothing. Sparse and
compressed requests blend nothing, and no request is both.

If an engine does not support a technique, it serves requests as if they had not asked for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from headrace_kvstore.identity.salts import EXACT, is_isolated, isolated_salt

FIELD = "techniques"
PARAM = f"vllm_xargs.{FIELD}"
BLENDING = "blending"
SPARSE = "sparse"
COMPRESSION = "compression"
OFFLOADING = "offload"
"""The part of sparse attention by which KV leaves the cache. Requests do not ask for it."""
PARTIAL_KV = (SPARSE, COMPRESSION)
"""Techniques whose answers use only a part of the KV. A request has one of them at most."""
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


def is_exact_requested(extra: object) -> bool:
    """Return whether a request with these `vllm_xargs` wants exact KV only.

    Raises:
        TechniqueError: the field is neither "auto" nor "off".
    """
    value = extra.get(FIELD, "auto") if isinstance(extra, Mapping) else "auto"
    if value not in ("auto", "off"):
        raise TechniqueError(f'{PARAM} must be "auto" or "off".', PARAM)
    return bool(value == "off")


def recompute_ratio(extra: object, mode: str, default: float) -> float | None:
    """Return the share of blended KV to recompute; None if the request may blend nothing.

    Args:
        extra: the request's `vllm_xargs`.
        mode: the app's mode, one of `MODES`.
        default: ratio if the request names none.

    Raises:
        TechniqueError: one of the fields is invalid.
    """
    return _ratio(BLENDING, extra, mode, default)


class LossyMode(NamedTuple):
    """The technique of a request whose answer attends to only a part of its KV, and its keep ratio.

    The ratio is the part that answer tokens attend to (sparse), or that is kept (compression).
    """

    technique: str
    keep_ratio: float


def lossy_mode_of(extra: object, modes: Mapping[str, tuple[str, float]]) -> LossyMode | None:
    """Return whether a request uses sparse attention or compression; None for neither.

    Args:
        extra: the request's `vllm_xargs`.
        modes: mode and default keep ratio of the `PARTIAL_KV` techniques that the app has.

    Raises:
        TechniqueError: one of the fields is invalid, or the request asks for both techniques.
    """
    requested = extra if isinstance(extra, Mapping) else {}
    found = {
        name: ratio
        for name in PARTIAL_KV
        if (ratio := _ratio(name, extra, *modes.get(name, ("off", 1.0)))) is not None
    }
    named = [name for name in found if name in requested]
    if len(named) > 1:
        raise TechniqueError(
            f"{named[0]} and {named[1]} exclude each other.", f"vllm_xargs.{named[1]}"
        )
    chosen = named or list(found)
    return LossyMode(chosen[0], found[chosen[0]]) if chosen else None


def _ratio(field: str, extra: object, mode: str, default: float) -> float | None:
    exact, param = is_exact_requested(extra), f"vllm_xargs.{field}"
    value = extra.get(field) if isinstance(extra, Mapping) else None
    ratio = default
    if isinstance(value, int | float) and not isinstance(value, bool):
        if not 0 < value <= 1:
            raise TechniqueError(f"{param} must be above 0 and at most 1.", param)
        ratio = float(value)
    elif value not in (None, "auto", "off"):
        raise TechniqueError(f'{param} must be "auto", "off" or a ratio.', param)
    is_wanted = mode == "auto" if value is None else value != "off"
    return ratio if is_wanted and mode != "off" and not exact else None


def requires_exact(request: Mapping[str, Any]) -> bool:
    """Return whether a request's decoded body asks for exact KV only.

    Raises:
        TechniqueError: the field is neither "auto" nor "off"; or it is "off" in a beam search,
            whose steps vLLM sends to the engine without the field.
    """
    exact = is_exact_requested(request.get("vllm_xargs"))
    if exact and request.get("use_beam_search"):
        raise TechniqueError(f'{PARAM} cannot be "off" in a beam search.', PARAM)
    return exact


def keep_ratio_in(params: Any, technique: str) -> float | None:
    """Return one technique's keep ratio in the extra arguments of an engine request's parameters.

    Returns:
        The ratio, below 1; None if the request uses all of its KV or has no parameters.
    """
    value = ((params and params.extra_args) or {}).get(technique)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1:
        return None
    return float(value)


def salt_with_technique(salt: str, extra: object, lossy: str) -> str:
    """Return the cache salt under which a request's KV is shared.

    The salt changes only if the request wants exact KV and the store is lossy.

    Args:
        salt: salt made from the tenant's and the client's (`identity.salts.tenant_salt`).
        extra: the request's `vllm_xargs`.
        lossy: the technique of the app's store; empty if the store is exact.

    Raises:
        TechniqueError: the field is invalid, or the client's salt begins like a marked one.
    """
    if is_isolated(salt):
        raise TechniqueError('cache_salt must not begin with "technique:".', "cache_salt")
    return isolated_salt(salt, EXACT) if is_exact_requested(extra) and lossy else salt


@dataclass(frozen=True)
class RequestedTechniques:
    """The techniques that a request allows or refuses; None leaves one to the app.

    Attributes:
        exact: whether the request wants exact KV only.
        blending, sparse, compression: whether the request allows these techniques.
    """

    exact: bool = False
    blending: bool | None = None
    sparse: bool | None = None
    compression: bool | None = None


def requested_techniques(request: Mapping[str, Any]) -> RequestedTechniques:
    """Read the techniques from a request's decoded body.

    Raises:
        TechniqueError: `requires_exact`, `recompute_ratio` or `lossy_mode_of` refuses a field.
    """
    extra = request.get("vllm_xargs")
    lossy_mode_of(extra, {name: ("request", 0.5) for name in PARTIAL_KV})
    allowed = {name: _allows(name, extra) for name in (BLENDING, *PARTIAL_KV)}
    return RequestedTechniques(requires_exact(request), **allowed)


def _allows(field: str, extra: object) -> bool | None:
    if _ratio(field, extra, "request", 1.0) is not None:
        return True
    return None if _ratio(field, extra, "auto", 1.0) is not None else False


def offered_techniques(lossy: str, modes: Mapping[str, str]) -> str:
    """Return a replica's techniques in the form that gateways pass to `applied_techniques`.

    Args:
        lossy: the technique of the store; empty if the store is exact.
        modes: the modes of `BLENDING`, `SPARSE` and `COMPRESSION`.
    """
    names = [f"{name}={mode}" for name, mode in modes.items() if mode != "off"]
    return ", ".join(filter(None, (lossy, *names)))


def applied_techniques(requested: RequestedTechniques, offer: str) -> str:
    """Return the value of `HEADER` for an answer.

    It is known before the first token, so it names the techniques that could be used.

    Args:
        requested: the techniques that the request allows or refuses.
        offer: the replica's techniques, from `offered_techniques`.
    """
    if requested.exact:
        return "exact"
    names = []
    wanted = {name: getattr(requested, name) for name in (BLENDING, *PARTIAL_KV)}
    for one in filter(None, offer.split(", ")):
        name, _, mode = one.partition("=")
        if name not in wanted:
            names.append(one)
        elif mode == "auto" if wanted[name] is None else wanted[name]:
            names.append(name)
    # A sparse or compressed request blends nothing; a technique that it asked for comes first.
    lossy = sorted((n for n in PARTIAL_KV if n in names), key=lambda name: not wanted[name])
    if lossy:
        names = [name for name in names if name not in wanted] + lossy[:1]
    return ", ".join(names) or "exact"
