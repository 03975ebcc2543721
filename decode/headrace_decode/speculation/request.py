"""What a request says about drafting, on its way from our server to the engine's worker.

`cache_salt` does not reach a worker, so the tenant travels in `sampling_params.extra_args`. Our
server writes it there for every request; what a client sends under the same name is lost.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

REQUEST_KEY = "headrace"
"""In `extra_args`: what our server says of the request."""
OPT_OUT_KEY = "headrace_draft"
"""In a client's `vllm_xargs`: 0, and nothing is drafted for the request or kept of it."""
KEEP_KEY = "headrace_keep"
"""Likewise: 0, and its answer is not kept, though it may be drafted for."""


@dataclass(frozen=True)
class Facts:
    """What a request brings along.

    Attributes:
        prompt_tokens: length of its prompt.
        tenant: as in `Memory.open_request`.
        drafts: False for a request that opted out: nothing is drafted for it or kept of it.
        keeps: whether its answer may be drafted from later.
        itl_s: its inter-token latency target; infinite without one.
        max_tokens: it ends after so many; None if nothing but the model ends it.
        temperature: at which its tokens are drawn; 0 takes the likeliest.
    """

    prompt_tokens: int
    tenant: str = ""
    drafts: bool = True
    keeps: bool = True
    itl_s: float = float("inf")
    max_tokens: int | None = None
    temperature: float = 0.0


def request_arguments(
    extra_args: Mapping[str, Any] | None,
    *,
    tenant: str,
    itl_s: float | None = None,
    drafts: bool = True,
    keeps: bool = True,
) -> dict[str, Any]:
    """A request's `extra_args` with what its engine must know; what a client wrote there is lost.

    Args:
        tenant: nothing of one tenant is drafted for another.
        drafts, keeps: the tenant's policy; a client may opt out by `OPT_OUT_KEY` and `KEEP_KEY`,
            never in.
    """
    given, own = extra_args or {}, (REQUEST_KEY, OPT_OUT_KEY, KEEP_KEY)
    kept = {k: v for k, v in given.items() if k not in own}
    told: dict[str, Any] = {"tenant": tenant}
    told["drafts"] = drafts and not opts_out(given.get(OPT_OUT_KEY, 1))
    told["keeps"] = keeps and not opts_out(given.get(KEEP_KEY, 1))
    if itl_s is not None:
        told["itl_s"] = itl_s
    return {**kept, REQUEST_KEY: told}


def facts_of(
    prompt_tokens: int,
    max_tokens: int | None,
    extra_args: Mapping[str, Any] | None,
    temperature: float = 0.0,
) -> Facts:
    """What a request brings along. If our server said nothing, it shares a nameless tenant with
    its like; what cannot be read is left out."""
    told = (extra_args or {}).get(REQUEST_KEY)
    if not isinstance(told, Mapping):
        told = {}
    itl_s = told.get("itl_s")
    good_itl = isinstance(itl_s, int | float) and math.isfinite(itl_s) and itl_s > 0
    return Facts(
        prompt_tokens=prompt_tokens,
        tenant=str(told.get("tenant", "")),
        drafts=bool(told.get("drafts", True)),
        keeps=bool(told.get("keeps", True)),
        itl_s=float(itl_s) if good_itl else math.inf,  # type: ignore[arg-type]
        max_tokens=max_tokens,
        temperature=temperature,
    )


def opts_out(value: Any) -> bool:
    """Whether a client that sends this under `OPT_OUT_KEY` wants no drafts."""
    return value in (0, False, "0", "no", "off", "false")
