"""Self-contained HTML page of a run: figures, and the run's course as SVG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from html import escape

import numpy as np
from numpy.typing import NDArray

from headrace.simulate.outcome import GoodputTargets, SimulationOutcome

COLOURS = ("#2364aa", "#d1495b", "#3a7d44", "#e09f3e", "#6d597a", "#2a9d8f", "#8d5524", "#555")
WIDTH, HEIGHT, LEFT, BOTTOM = 560, 200, 56, 24
_POINTS = 400
"""Maximum points of a line: longer courses are drawn as means over equal parts."""

ROWS: tuple[tuple[str, str, float, str], ...] = (
    ("goodput", "Goodput", 100.0, "%"),
    ("ttft_mean", "TTFT, mean", 1.0, "s"),
    ("ttft_p50", "TTFT, median", 1.0, "s"),
    ("ttft_p90", "TTFT, 90th percentile", 1.0, "s"),
    ("ttft_p99", "TTFT, 99th percentile", 1.0, "s"),
    ("tpot_mean", "Time a token, mean", 1e3, "ms"),
    ("tpot_p99", "Time a token, 99th percentile of requests", 1e3, "ms"),
    ("itl_p99", "Gap between tokens, 99th percentile", 1e3, "ms"),
    ("hit_rate", "Prompt tokens from a cache", 100.0, "%"),
    ("reachable", "of them within reach of one endless cache", 100.0, "%"),
    ("local_share", "Prompts computed by the decode engine", 100.0, "%"),
    ("prefill_use", "Prefill engines at work", 100.0, "%"),
    ("decode_use", "Decode engines at work", 100.0, "%"),
    ("preempted", "Preemptions", 1.0, ""),
    ("lost", "Requests that lost an engine", 1.0, ""),
    ("requests", "Requests measured", 1.0, ""),
)
"""Field, label, factor and unit of each row of the table."""

CHARTS = (
    ("prefill_busy", "Share of prefill engines at work"),
    ("decode_busy", "Share of decode engines at work"),
    ("queue_tokens", "Prompt tokens that wait"),
    ("running", "Requests that decode"),
    ("kv_used", "Share of the decode engines' KV in use"),
)


def page(
    title: str,
    parameters: Mapping[str, str],
    outcomes: Mapping[str, SimulationOutcome],
    courses: Mapping[str, Mapping[str, NDArray[np.float64]]],
    targets: GoodputTargets,
) -> str:
    """Return the report page.

    Args:
        parameters: the run's parameters, by label.
        outcomes, courses: figures and courses, by policy.
    """
    legend = " ".join(
        f'<span style="color:{COLOURS[n % len(COLOURS)]}">&#9632;</span> {escape(name)}'
        for n, name in enumerate(outcomes)
    )
    facts = "".join(f"<li>{escape(k)}: {escape(v)}</li>" for k, v in parameters.items())
    charts = "".join(
        f"<figure><figcaption>{label}</figcaption>"
        + chart([(course["at_s"], course[name]) for course in courses.values()])
        + "</figure>"
        for name, label in CHARTS
    )
    goal = (
        f"Goodput: requests with their first token within {targets.ttft_s:g} s"
        + (f" plus {1e3 * targets.ttft_token_s:g} ms a token" if targets.ttft_token_s else "")
        + f", and at most {1e3 * targets.itl_s:g} ms a token after it on average."
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f"<title>{escape(title)}</title><style>"
        "body{font:15px/1.5 system-ui,sans-serif;margin:2em auto;max-width:72em;padding:0 1em;"
        "color:#222;background:#fff}table{border-collapse:collapse}"
        "td,th{padding:.2em .8em;border-bottom:1px solid #ddd;text-align:right}"
        "td:first-child,th:first-child{text-align:left}"
        "figure{display:inline-block;margin:1em 1em 0 0}"
        "figcaption{font-weight:600}</style></head><body>"
        f"<h1>{escape(title)}</h1><ul>{facts}</ul><p>{goal}</p>{table(outcomes)}"
        f"<p>{legend}</p>{charts}</body></html>\n"
    )


def table(outcomes: Mapping[str, SimulationOutcome]) -> str:
    """Return a table of the figures with one column for each policy."""
    head = "".join(f"<th>{escape(name)}</th>" for name in outcomes)
    figures = [asdict(outcome) for outcome in outcomes.values()]
    rows = "".join(
        f"<tr><td>{label}</td>"
        + "".join(f"<td>{_number(one[name] * factor)} {unit}</td>" for one in figures)
        + "</tr>"
        for name, label, factor, unit in ROWS
    )
    return f"<table><thead><tr><th></th>{head}</tr></thead><tbody>{rows}</tbody></table>"


def chart(lines: Sequence[tuple[NDArray[np.float64], NDArray[np.float64]]]) -> str:
    """Draw lines (x in seconds, y) as SVG, both axes from 0."""
    thinned = [_thinned(x, y) for x, y in lines]
    max_x = max((float(x[-1]) for x, _ in thinned if len(x)), default=1.0) or 1.0
    max_y = max((float(y.max()) for _, y in thinned if len(y)), default=1.0) or 1.0
    wide, high = WIDTH - LEFT, HEIGHT - BOTTOM
    drawn = []
    for n, (x, y) in enumerate(thinned):
        points = " ".join(
            f"{LEFT + wide * a / max_x:.1f},{high - (high - 8) * b / max_y:.1f}"
            for a, b in zip(x.tolist(), y.tolist(), strict=True)
        )
        colour = COLOURS[n % len(COLOURS)]
        drawn.append(f'<polyline fill="none" stroke="{colour}" points="{points}"/>')
    axes = (
        f'<path d="M{LEFT} 8V{high}H{WIDTH}" fill="none" stroke="#999"/>'
        f'<text x="{LEFT - 4}" y="14" text-anchor="end">{_number(max_y)}</text>'
        f'<text x="{LEFT - 4}" y="{high}" text-anchor="end">0</text>'
        f'<text x="{WIDTH}" y="{HEIGHT - 6}" text-anchor="end">{_number(max_x)} s</text>'
    )
    return (
        f'<svg width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'font-size="12">{axes}{"".join(drawn)}</svg>'
    )


def _thinned(
    x: NDArray[np.float64], y: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    each = -(-len(x) // _POINTS)
    if each <= 1:
        return x, y
    full = len(x) // each * each
    return x[:full].reshape(-1, each)[:, -1], y[:full].reshape(-1, each).mean(axis=1)


def _number(value: float) -> str:
    """Format a number: three significant digits below 100, whole numbers from 100 on."""
    if value == 0 or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"
