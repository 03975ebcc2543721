"""Drafting's metrics: what a decode replica's reports say, as Ray's counters and gauges.

Totals of drafted and accepted tokens without a source are vLLM's own, `ray_vllm_spec_decode_*`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ray.util.metrics import Counter, Gauge

MODES = ("auto", "static", "off")
COUNTS = {
    "steps": "Engine steps that decoded.",
    "drafted_steps": "Engine steps that verified drafts.",
    "row_steps": "Requests that decoded in a step, summed over the steps.",
    "emitted_tokens": "Tokens emitted; over row_steps these are tokens a request and step.",
}
GAUGES = {
    "budget_tokens": "Draft tokens that the last step verified.",
    "token_seconds": "Seconds that one more token would have made the last step longer.",
    "survival_price": "Survival that one more draft token had to offer in the last budget.",
    "saved_seconds": "Seconds that drafting saved of late, against steps without drafts.",
    "regret_bound_seconds": "Seconds that drafting lost of late at most, with confidence.",
}


class RayDraftingMetrics:
    """Called with each report, as `HeadraceProposer.command` answers it."""

    def __init__(self) -> None:
        name = "headrace_speculation_"
        self._drafted = Counter(
            f"{name}drafted_tokens", "Draft tokens given to the engine.", tag_keys=("source",)
        )
        self._accepted = Counter(
            f"{name}accepted_tokens", "Draft tokens that it accepted.", tag_keys=("source",)
        )
        self._propose = Counter(f"{name}propose_seconds", "Seconds spent on making drafts.")
        self._failures = Counter(f"{name}failures", "Steps whose drafts were lost to an error.")
        self._counts = {key: Counter(name + key, text) for key, text in COUNTS.items()}
        self._gauges = {key: Gauge(name + key, text) for key, text in GAUGES.items()}
        self._mode = Gauge(f"{name}mode", "1 for the mode in force.", tag_keys=("mode",))
        self._told: dict[tuple[Counter, str], float] = {}

    def __call__(self, report: Mapping[str, Any]) -> None:
        for source, tokens in report["sources"].items():
            self._grown(self._drafted, tokens["drafted"], source)
            self._grown(self._accepted, tokens["accepted"], source)
        for key, counter in self._counts.items():
            self._grown(counter, report["counts"].get(key, 0))
        self._grown(self._propose, report["propose_s"])
        self._grown(self._failures, report["failures"])
        for key, value in gauges(report).items():
            self._gauges[key].set(value)
        for mode in MODES:
            self._mode.set(float(mode == report["mode"]), tags={"mode": mode})

    def _grown(self, counter: Counter, total: float, source: str = "") -> None:
        """Bring a counter to the report's total."""
        more = total - self._told.get((counter, source), 0.0)
        if more > 0:
            counter.inc(more, tags={"source": source} if source else None)
            self._told[counter, source] = total


def gauges(report: Mapping[str, Any]) -> dict[str, float]:
    """The values of `GAUGES`."""
    values = (
        report["budget_tokens"],
        report["token_s"],
        report["price"],
        report["saved_s"],
        report["regret_bound_s"],
    )
    return dict(zip(GAUGES, map(float, values), strict=True))
