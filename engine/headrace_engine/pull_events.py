"""Counts and seconds, by event, in a report on pulls. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

PROVED, UNPROVED, PIECES, EPOCHS = "proved", "unproved", "pieces", "epochs"
"""Lists of a report: [seconds, checked]; [request id, producer, kind, why]; numbers; epochs in hex,
one after each reset of the engine's caches."""


def transfers_by_event(data: Mapping[str, Any]) -> dict[str, int]:
    """Count a report's pulls by event."""
    counts: dict[str, int] = {}
    for _, checked in data.get(PROVED, ()):
        counts["proved"] = counts.get("proved", 0) + 1
        counts["checked"] = counts.get("checked", 0) + int(checked)
    for _, _, kind, _ in data.get(UNPROVED, ()):
        counts[f"unproved_{kind}"] = counts.get(f"unproved_{kind}", 0) + 1
    return {event: n for event, n in counts.items() if n}


def seconds_by_event(data: Mapping[str, Any]) -> dict[str, float]:
    """Return the seconds that proofs took: `identity` without fingerprints, `checked` with them."""
    seconds: dict[str, float] = {}
    for took, checked in data.get(PROVED, ()):
        kind = "checked" if checked else "identity"
        seconds[kind] = seconds.get(kind, 0.0) + took
    return seconds
