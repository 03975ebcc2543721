"""What an engine is told of bounded contexts, in vLLM's `additional_config`.

    {"headrace_bounded": {"mode": "request", "share": 0.25}}

It stands beside what the engine is told of sparse attention, whose units are those that are kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from headrace_kvstore.connector.identity import BOUNDED_KEY

FIELD = "bounded"
"""In a request's extra arguments: the share of its context's KV that it keeps, above 0 and at most
1."""


@dataclass(frozen=True)
class BoundedSettings:
    """How an app bounds contexts.

    Attributes:
        mode: of `techniques.MODES`.
        share: of a context's KV that is kept, where a request names none.
    """

    mode: str = "request"
    share: float = 0.25

    def additional_config(self) -> dict[str, Any]:
        """What goes into the engine's `additional_config`."""
        return {BOUNDED_KEY: asdict(self)}


def settings_of(additional_config: Any) -> BoundedSettings | None:
    """What an engine is told; None where no context is bounded.

    Raises:
        TypeError: fields that are unknown.
    """
    told = additional_config.get(BOUNDED_KEY) if isinstance(additional_config, Mapping) else None
    return BoundedSettings(**told) if told else None


def share_of(params: Any) -> float | None:
    """The share that a request's sampling parameters ask for; None for one that keeps all."""
    value = ((params and params.extra_args) or {}).get(FIELD)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1:
        return None
    return float(value)
