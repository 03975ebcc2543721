"""What a request says about lossy techniques: which of them may touch its KV.

In a request's `vllm_xargs`:

    techniques: "auto"    what the app is configured for; the default
    techniques: "off"     exact KV only

    reuse: "auto"         stored KV may be reused at other places of the prompt (docs/reuse.md)
    reuse: "off"          it may not
    reuse: 0.3            it may, and this share of it is computed again

    sparse: "auto"        answer tokens may attend to a part of the KV (docs/sparse.md)
    sparse: "off"         they attend to all of it
    sparse: 0.2           they may, to this share of it

    bounded: "auto"       a part of a long prompt's KV may be dropped (docs/bounded.md)
    bounded: "off"        all of it is kept
    bounded: 0.25         it may, and this share of it is kept

Without `reuse`, `sparse` or `bounded` the app's `techniques.NAME.mode` decides. The gateway reads
all of this to refuse what is wrong and to tell what applied; the decode replica reads it again,
since not every path leads through a gateway. Four techniques exist: a store with a lossy codec,
reuse, sparse attention, and bounded contexts. A request with "off" in an app with such a store gets
a cache salt under the mark `EXACT` (`headrace_kvstore.salts`), here and at the replica that
prefills for it. The prompts of sparse and bounded requests are computed exactly and shared as any
other; blocks with tokens of their answers are private (`headrace_engine.private_kv`), as are blocks
of KV that was reused. Contexts that drop KV while they are computed share nothing
(`bounded.engine.streams`). Sparse and bounded requests reuse nothing, and no request is both.

An engine that cannot do a technique serves requests as if they had not asked.
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
"""Of a technique in an app: never, for requests that ask, for all that do not refuse."""
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
    return _share(REUSE, extra, mode, default)


class Apart(NamedTuple):
    """The technique of a request that attends to a part of its KV, and the share of it: what answer
    tokens attend to, or what is kept."""

    technique: str
    share: float


def apart_of(extra: object, modes: Mapping[str, tuple[str, float]]) -> Apart | None:
    """What a request wants of sparse attention or bounded contexts; None for neither.

    Args:
        extra: the request's `vllm_xargs`.
        modes: mode and default share of `SPARSE` and `BOUNDED` in the app; less those that it has
            not.

    Raises:
        TechniqueError: one of the fields is wrong, or the request asks for both.
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
    """The same of a request's decoded body.

    Raises:
        TechniqueError: as `wants_exact`; or the request is a beam search, whose steps vLLM sends to
            the engine without the field.
    """
    exact = wants_exact(request.get("vllm_xargs"))
    if exact and request.get("use_beam_search"):
        raise TechniqueError(f'{PARAM} cannot be "off" in a beam search.', PARAM)
    return exact


def share_in(params: Any, technique: str) -> float | None:
    """The share of one technique that an engine's request brings in the extra arguments of its
    sampling parameters; None for all of its KV, as is 1, and where it has no parameters."""
    value = ((params and params.extra_args) or {}).get(technique)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1:
        return None
    return float(value)


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


@dataclass(frozen=True)
class Asked:
    """What a request says of techniques; None leaves it to the app.

    Attributes:
        exact: it wants exact KV only.
        reuse, sparse, bounded: whether it allows these.
    """

    exact: bool = False
    reuse: bool | None = None
    sparse: bool | None = None
    bounded: bool | None = None


def asked_of(request: Mapping[str, Any]) -> Asked:
    """What a request's decoded body says.

    Raises:
        TechniqueError: as `exact_of`, `reuse_share` and `apart_of`.
    """
    extra = request.get("vllm_xargs")
    apart_of(extra, {name: ("request", 0.5) for name in (SPARSE, BOUNDED)})
    return Asked(exact_of(request), *(_allows(name, extra) for name in (REUSE, SPARSE, BOUNDED)))


def _allows(field: str, extra: object) -> bool | None:
    if _share(field, extra, "request", 1.0) is not None:
        return True
    return None if _share(field, extra, "auto", 1.0) is not None else False


def offered(lossy: str, modes: Mapping[str, str]) -> str:
    """What a replica tells gateways, for `applied`: what its store applies, and the modes of
    `REUSE`, `SPARSE` and `BOUNDED`."""
    told = [f"{name}={mode}" for name, mode in modes.items() if mode != "off"]
    return ", ".join(filter(None, (lossy, *told)))


def applied(asked: Asked, offer: str) -> str:
    """What `HEADER` says. It is known before the first token, so it tells what could be used.

    Args:
        offer: the replica's, as `offered`.
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
    # A request is sparse or bounded, and then it reuses nothing; what it asked for comes first.
    apart = sorted((n for n in (SPARSE, BOUNDED) if n in told), key=lambda name: not wanted[name])
    if apart:
        told = [name for name in told if name not in wanted] + apart[:1]
    return ", ".join(told) or "exact"
