"""The metric of what an engine runs without."""

from __future__ import annotations

from collections.abc import Mapping

from ray.serve.metrics import Gauge


def export_left_out(left_out: Mapping[str, str]) -> None:
    """Export the parts that a replica's engine runs without.

    Args:
        left_out: by part, the reason (`MeteredVLLMEngine.left_out`). The status has the reasons.
    """
    gauge = Gauge(
        "headrace_engine_left_out",
        "1 for each part that the engine runs without though the app has it.",
        tag_keys=("part",),
    )
    for part in left_out:
        gauge.set(1.0, tags={"part": part})
