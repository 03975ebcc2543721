"""The dashboard of speculative decoding: its gain and its cost."""

from __future__ import annotations

from scripts.generate.dashboards import promql as q
from scripts.generate.dashboards.panel import DashboardSpec, Panel
from scripts.generate.dashboards.promql import WINDOW


def speculation() -> DashboardSpec:
    """Return the dashboard."""
    name = "ray_headrace_speculation_"
    drafted, accepted = f"{name}drafted_tokens_total", f"{name}accepted_tokens_total"
    steps = q.rate(f"{name}steps_total", WINDOW)
    return DashboardSpec(
        "headrace-speculation",
        "Headrace: speculative decoding",
        (
            Panel(
                "Tokens a request and step",
                "How many tokens does an engine step give? Without draft tokens it is 1.",
                {
                    "tokens": q.share(
                        q.rate(f"{name}emitted_tokens_total", WINDOW),
                        q.rate(f"{name}row_steps_total", WINDOW),
                    )
                },
            ),
            Panel(
                "Draft tokens",
                "How many draft tokens are proposed, and from which source?",
                {"{{source}}": q.rate(drafted, WINDOW, "source")},
                "ops",
            ),
            Panel(
                "Acceptance",
                "Which sources' draft tokens are accepted?",
                {
                    "{{source}}": q.share(
                        q.rate(accepted, WINDOW, "source"), q.rate(drafted, WINDOW, "source")
                    )
                },
                "percentunit",
                1,
            ),
            Panel(
                "Steps with drafts",
                "Does the budget still draft at this load? 0 under load is meant.",
                {"steps": q.share(q.rate(f"{name}drafted_steps_total", WINDOW), steps)},
                "percentunit",
                1,
            ),
            Panel(
                "Price",
                "How likely must a draft token be accepted to be worth verifying?",
                {"highest of the replicas": q.most(f"{name}survival_price")},
                "percentunit",
                1,
            ),
            Panel(
                "Saved, and lost at most",
                "Does speculative decoding pay, against random steps without draft tokens?",
                {
                    "saved": q.total(f"{name}saved_seconds"),
                    "lost at most": q.total(f"{name}regret_bound_seconds"),
                },
                "s",
            ),
            Panel(
                "Cost of making drafts",
                "How much of each second do the engines spend on making drafts?",
                {"making drafts": q.rate(f"{name}propose_seconds_total", WINDOW)},
                "percentunit",
            ),
            Panel(
                "Mode and failures",
                "Is it on, and does it fail? Replicas by mode; failed steps per second.",
                {
                    "{{mode}}": q.total(f"{name}mode", "mode"),
                    "failures": q.rate(f"{name}failures_total", WINDOW),
                },
            ),
        ),
    )
