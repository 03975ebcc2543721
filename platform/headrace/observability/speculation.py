"""Metrics of speculative decoding, made of the reports of a decode replica.

vLLM itself exports the totals of drafted and accepted tokens over all sources, as
`ray_vllm_spec_decode_*`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ray.serve.metrics import Gauge

from headrace.observability.totals import TotalCounter

MODES = ("auto", "static", "off")
COUNTS = {
    "steps": "Engine steps that decoded.",
    "drafted_steps": "Engine steps that verified draft tokens.",
    "row_steps": "Requests that decoded in a step, summed over the steps.",
    "emitted_tokens": "Tokens emitted; over row_steps these are tokens a request and step.",
}
GAUGES = {
    "budget_tokens": "Draft tokens that the last step verified.",
    "token_seconds": "Seconds that one more token would have made the last step longer.",
    "survival_price": "Acceptance probability that one more draft token needed in the last budget.",
    "saved_seconds": "Seconds saved recently, compared with steps without draft tokens.",
    "regret_bound_seconds": "Upper confidence bound of the seconds lost recently.",
}


class RaySpeculationMetrics:
    """Exporter that is called with each report (the answer of `HeadraceProposer.command`)."""

    def __init__(self) -> None:
        name = "headrace_speculation_"
        self._drafted = TotalCounter(
            f"{name}drafted_tokens", "Draft tokens given to the engine.", tag_keys=("source",)
        )
        self._accepted = TotalCounter(
            f"{name}accepted_tokens", "Draft tokens that it accepted.", tag_keys=("source",)
        )
        self._propose = TotalCounter(
            f"{name}propose_seconds", "Seconds spent on proposing draft tokens."
        )
        self._failures = TotalCounter(
            f"{name}failures", "Steps whose draft tokens were lost because of an error."
        )
        self._counts = {key: TotalCounter(name + key, text) for key, text in COUNTS.items()}
        self._gauges = {key: Gauge(name + key, text) for key, text in GAUGES.items()}
        self._mode = Gauge(f"{name}mode", "1 for the mode in force.", tag_keys=("mode",))

    def __call__(self, report: Mapping[str, Any]) -> None:
        for source, tokens in report["sources"].items():
            self._drafted.follow(tokens["drafted"], {"source": source})
            self._accepted.follow(tokens["accepted"], {"source": source})
        for key, counter in self._counts.items():
            counter.follow(report["counts"].get(key, 0))
        self._propose.follow(report["propose_s"])
        self._failures.follow(report["failures"])
        for key, value in gauges(report).items():
            self._gauges[key].set(value)
        for mode in MODES:
            self._mode.set(float(mode == report["mode"]), tags={"mode": mode})


def gauges(report: Mapping[str, Any]) -> dict[str, float]:
    """Return the values of `GAUGES`."""
    values = (
        report["budget_tokens"],
        report["token_s"],
        report["price"],
        report["saved_s"],
        report["regret_bound_s"],
    )
    return dict(zip(GAUGES, map(float, values), strict=True))
