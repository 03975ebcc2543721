"""The facts about a request that the engine's proposer needs, passed on by the decode server.

`cache_salt` does not reach a worker, so the tenant is sent in `sampling_params.extra_args`. The
decode server writes it there for every request, and drops a client's value under the same name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

REQUEST_KEY = "headrace"
"""Key in `extra_args` of the decode server's facts about the request."""
OPT_OUT_KEY = "headrace_draft"
"""Key in a client's `vllm_xargs`: with 0, no tokens are drafted for the request or kept of it."""
KEEP_KEY = "headrace_keep"
"""Key in a client's `vllm_xargs`: with 0, tokens may be drafted, but the answer is not kept."""


@dataclass(frozen=True)
class RequestInfo:
    """The facts about a request that the proposer needs.

    Attributes:
        prompt_tokens: length of its prompt.
        tenant: its tenant (`DraftMemory.open_request`).
        drafts: False for a request that opted out: no tokens are drafted for it or kept of it.
        keeps: whether its answer may be drafted from later.
        itl_s: its inter-token latency target; infinite without one.
        max_tokens: maximum length of the answer; None if only the model ends it.
        temperature: sampling temperature; 0 takes the most likely token.
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
    """Return a request's `extra_args` with the facts for the engine.

    A client's own values under these keys are removed.

    Args:
        extra_args: the client's `extra_args`.
        tenant: the request's tenant; text of one tenant is never drafted for another.
        itl_s: the inter-token latency target.
        drafts, keeps: the tenant's policy; a client may opt out with `OPT_OUT_KEY` and `KEEP_KEY`,
            but not opt in.
    """
    given, own = extra_args or {}, (REQUEST_KEY, OPT_OUT_KEY, KEEP_KEY)
    kept = {k: v for k, v in given.items() if k not in own}
    values: dict[str, Any] = {"tenant": tenant}
    values["drafts"] = drafts and not opts_out(given.get(OPT_OUT_KEY, 1))
    values["keeps"] = keeps and not opts_out(given.get(KEEP_KEY, 1))
    if itl_s is not None:
        values["itl_s"] = itl_s
    return {**kept, REQUEST_KEY: values}


def parse_request_info(
    prompt_tokens: int,
    max_tokens: int | None,
    extra_args: Mapping[str, Any] | None,
    temperature: float = 0.0,
) -> RequestInfo:
    """Read the facts about a request.

    Requests without facts of the decode server share a nameless tenant. Invalid values are ignored.
    """
    values = (extra_args or {}).get(REQUEST_KEY)
    if not isinstance(values, Mapping):
        values = {}
    itl_s = values.get("itl_s")
    good_itl = isinstance(itl_s, int | float) and math.isfinite(itl_s) and itl_s > 0
    return RequestInfo(
        prompt_tokens=prompt_tokens,
        tenant=str(values.get("tenant", "")),
        drafts=bool(values.get("drafts", True)),
        keeps=bool(values.get("keeps", True)),
        itl_s=float(itl_s) if good_itl else math.inf,  # type: ignore[arg-type]
        max_tokens=max_tokens,
        temperature=temperature,
    )


def opts_out(value: Any) -> bool:
    """Return whether this value of `OPT_OUT_KEY` or `KEEP_KEY` opts out."""
    return value in (0, False, "0", "no", "off", "false")
