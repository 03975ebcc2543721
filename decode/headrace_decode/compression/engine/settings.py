"""Settings of KV cache compression for an engine, in vLLM's `additional_config`.

    {"headrace_compression": {"mode": "request", "keep_ratio": 0.25, "calibration": FILE}}

The settings of sparse attention must be there too. Their page is the page that heads keep.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from headrace_engine.connector.identity.engine_identity import COMPRESSION_SETTINGS_KEY


@dataclass(frozen=True)
class CompressionSettings:
    """Settings of KV cache compression for an app.

    Attributes:
        mode: one of `techniques.MODES`.
        keep_ratio: part of a context's KV that is kept if the request names none.
        calibration: file of the model's predictor; None: contexts are read again.
        stream: whether all compressed contexts are streamed (`IncrementalJob`), not only those
            longer than the cache. Needs a predictor.
    """

    mode: str = "request"
    keep_ratio: float = 0.25
    calibration: str | None = None
    stream: bool = False

    def additional_config(self) -> dict[str, Any]:
        """Return the entry for the engine's `additional_config`."""
        return {COMPRESSION_SETTINGS_KEY: asdict(self)}


def settings_of(additional_config: Any) -> CompressionSettings | None:
    """Return an engine's settings; None if contexts are not compressed.

    Raises:
        TypeError: a field is unknown.
    """
    settings = (
        additional_config.get(COMPRESSION_SETTINGS_KEY)
        if isinstance(additional_config, Mapping)
        else None
    )
    return CompressionSettings(**settings) if settings else None
