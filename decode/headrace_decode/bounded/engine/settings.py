"""What an engine is told of bounded contexts, in vLLM's `additional_config`.

    {"headrace_bounded": {"mode": "request", "share": 0.25, "calibration": "/models/gate"}}

It stands beside what the engine is told of sparse attention, whose units are those that are kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from headrace_kvstore.connector.identity.engine_identity import BOUNDED_KEY


@dataclass(frozen=True)
class BoundedSettings:
    """How an app bounds contexts.

    Attributes:
        mode: of `techniques.MODES`.
        share: of a context's KV that is kept, where a request names none.
        calibration: file of the model's gate; None: contexts are read again.
        stream: whether all bounded contexts are streamed (`course.Stream`), not only those longer
            than the cache. Takes a gate.
    """

    mode: str = "request"
    share: float = 0.25
    calibration: str | None = None
    stream: bool = False

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
