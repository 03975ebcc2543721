"""Plans as a gateway makes them for a decode replica `d1` and, if remote, a prefill replica `x`."""

from __future__ import annotations

from typing import Any

from headrace.router.placement.pair_search import LOCAL_PARTS, REMOTE_PARTS
from headrace.router.plan import Plan, Run

TOKENS = 100


def gateway_plan(kind: str, **other: Any) -> Plan:
    """A plan for a prompt of `TOKENS` tokens of which nobody has anything.

    Args:
        kind: local or remote. other: fields that differ.
    """
    computed = (Run("compute", TOKENS),)
    sides = {"local": LOCAL_PARTS, "remote": REMOTE_PARTS}
    predicted = {f"{side}.{part}": 0.01 for side, parts in sides.items() for part in parts}
    predicted |= {f"{side}.total": 0.01 * len(parts) for side, parts in sides.items()}
    remote = kind == "remote"
    fields: dict[str, Any] = {
        "request_id": "g-1",
        "prefill": "prefill" if remote else None,
        "prompt_tokens": TOKENS,
        "cached_decode_tokens": 0,
        "cached_prefill_tokens": 0,
        "decode": "d1",
        "replica": "x" if remote else "",
        "runs": computed,
        "fallback": computed if remote else (),
        "predicted": predicted,
        "timeout_s": 5.0 if remote else 0.0,
        "reasons": (f"{kind} saves 0.050 s",),
    }
    return Plan(**fields | other)
