"""What a request says about lossy techniques: which of them may touch its KV.

In a request's `vllm_xargs`:

    techniques: "auto"    what the app is configured for; the default
    techniques: "off"     exact KV only

The gateway reads it to refuse what is wrong and to tell what applied; the decode replica reads it
again, since not every path leads through a gateway. One technique exists: a store with a lossy
codec. A request with "off" in such an app gets a cache salt under the mark `EXACT`
(`headrace_kvstore.salts`), here and at the replica that prefills for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace_kvstore.salts import EXACT, is_marked, marked

FIELD = "techniques"
PARAM = f"vllm_xargs.{FIELD}"
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


def applied(exact: bool, lossy: str) -> str:
    """What `HEADER` says. It is known before the first token, so it tells what could be used."""
    return lossy if lossy and not exact else "exact"
