"""Self-contained HTML page of a run: figures, and the run's course as SVG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from html import escape

import numpy as np
from numpy.typing import NDArray

from headrace_lab.simulate.outcome import GoodputTargets, SimulationOutcome
from headrace_lab.simulate.run import SimulationRun

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000", "#777")
"""Colours that colour-blind people can tell apart (Okabe and Ito); the dashes differ, too."""
DASHES = ("", "6 3", "2 3", "10 3 2 3", "", "6 3", "2 3", "10 3 2 3")
WIDTH, HEIGHT, TOP, BOTTOM = 560, 220, 24, 24
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
    runs: Mapping[str, SimulationRun],
    targets: GoodputTargets,
) -> str:
    """Return the report page.

    Args:
        parameters: the run's parameters, by label.
        runs: results by policy.
    """
    outcomes = {name: run.outcome for name, run in runs.items()}
    legend = " ".join(f"<span>{_sample(n)} {escape(name)}</span>" for n, name in enumerate(runs))
    facts = "".join(f"<li>{escape(k)}: {escape(v)}</li>" for k, v in parameters.items())
    charts = _figure("Share of requests with their first token within", _distributions(runs))
    for field, label in CHARTS:
        lines = [(run.course["at_s"], run.course[field]) for run in runs.values()]
        charts += _figure(label, chart(lines))
    goal = (
        f"Goodput: requests with their first token within {targets.ttft_s:g} s"
        + (f" plus {1e3 * targets.ttft_token_s:g} ms a token" if targets.ttft_token_s else "")
        + f", and at most {1e3 * targets.itl_s:g} ms a token after it on average."
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body>"
        f"<h1>{escape(title)}</h1><p class=result>{escape(conclusion(outcomes))}</p>"
        f"<div class=wide>{table(outcomes)}</div><p>{goal}</p>"
        f"<p class=legend>{legend}</p><div class=charts>{charts}</div>"
        f"<h2>Parameters</h2><ul>{facts}</ul></body></html>\n"
    )


STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;margin:2em auto;max-width:80em;padding:0 1em;"
    "color:#222;background:#fff}li{overflow-wrap:anywhere}h1{font-size:1.5em}"
    ".result{font-size:1.15em;font-weight:600}.wide{overflow-x:auto}"
    "table{border-collapse:collapse}"
    "td,th{padding:.2em .6em;border-bottom:1px solid #ddd;text-align:right}"
    "td:first-child,th:first-child{text-align:left}td+td,th+th,.legend span{white-space:nowrap}"
    ".legend span{margin-right:1.5em}"
    "@media(max-width:30em){td,th{padding:.2em .3em}table{font-size:13px}}"
    ".charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,26em),1fr));"
    "gap:1.5em}figure{margin:0}figcaption{font-weight:600}svg.chart{width:100%;height:auto}"
)


def conclusion(outcomes: Mapping[str, SimulationOutcome]) -> str:
    """Return the result in one sentence."""
    ranked = sorted(outcomes.items(), key=lambda one: (-one[1].goodput, one[1].ttft_mean))
    (best, first), *others = ranked
    told = (
        f"{best} keeps the targets for {first.goodput:.0%} of the requests; half of all requests "
        f"have their first token within {_number(first.ttft_p50)} s, 99 % within "
        f"{_number(first.ttft_p99)} s"
    )
    if others:
        rest = ", ".join(f"{name} for {one.goodput:.0%}" for name, one in others)
        told += f". The other policies: {rest}"
    return told + "."


def _figure(label: str, drawing: str) -> str:
    return f"<figure><figcaption>{label}</figcaption>{drawing}</figure>"


def _sample(number: int) -> str:
    """Return a short piece of a policy's line, for the legend."""
    line = f'<path d="M0 5H28" {_stroke(number)}/>'
    return f'<svg width="28" height="10" aria-hidden="true">{line}</svg>'


def _stroke(number: int) -> str:
    colour, dash = (each[number % len(each)] for each in (COLOURS, DASHES))
    dashes = f' stroke-dasharray="{dash}"' if dash else ""
    return f'fill="none" stroke="{colour}" stroke-width="1.8"{dashes}'


def _distributions(runs: Mapping[str, SimulationRun]) -> str:
    """Draw the share of requests with a first token within each time, up to the largest 99th
    percentile."""
    end_s = max(run.outcome.ttft_p99 for run in runs.values()) or 1.0
    times = np.linspace(0.0, end_s, _POINTS)
    shares = (
        np.searchsorted(np.sort(run.ttft_s), times, side="right") / max(1, len(run.ttft_s))
        for run in runs.values()
    )
    return chart([(times, share) for share in shares])


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
    high = HEIGHT - BOTTOM
    drawn = []
    for n, (x, y) in enumerate(thinned):
        points = " ".join(
            f"{WIDTH * a / max_x:.1f},{high - (high - TOP) * b / max_y:.1f}"
            for a, b in zip(x.tolist(), y.tolist(), strict=True)
        )
        drawn.append(f'<polyline {_stroke(n)} points="{points}"/>')
    axes = (
        f'<path d="M0 {TOP}V{high}H{WIDTH}" fill="none" stroke="#999"/>'
        f'<path d="M0 {TOP}H{WIDTH}" fill="none" stroke="#ddd"/>'
        f'<text x="0" y="{TOP - 6}">{_number(max_y)}</text>'
        f'<text x="0" y="{HEIGHT - 6}">0</text>'
        f'<text x="{WIDTH}" y="{HEIGHT - 6}" text-anchor="end">{_number(max_x)} s</text>'
    )
    return (
        f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" font-size="13">'
        f"{axes}{''.join(drawn)}</svg>"
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
