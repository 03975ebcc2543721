"""The dashboard of the SLOs: waits, the flow of answers, errors."""

from __future__ import annotations

from scripts.generate.dashboards import alerts
from scripts.generate.dashboards import promql as q
from scripts.generate.dashboards.panel import DashboardSpec, Kind, Panel
from scripts.generate.dashboards.promql import WINDOW


def slos() -> DashboardSpec:
    """Return the dashboard."""
    ttft = "ray_headrace_gateway_ttft_seconds"
    in_time = f"{alerts.T['ttft_s'].value:g}"
    good = q.rate(f"{ttft}_bucket", WINDOW, streamed="yes", le=in_time)
    streams = q.rate(f"{ttft}_count", WINDOW, streamed="yes")
    budget = 1 - alerts.T["ttft_objective"].value
    return DashboardSpec(
        "headrace-slos",
        "Headrace: SLOs",
        (
            Panel(
                "Time to first token",
                "How long do users of streams wait for the first token? Measured at the gateway.",
                q.quantiles(ttft, 0.5, 0.9, 0.99, streamed="yes"),
                "s",
                limits=("ttft_s",),
                alerts=("TtftBurnsFast", "TtftBurnsSlowly"),
            ),
            Panel(
                "Distribution of the time to first token",
                "Are all streams a little late, or few of them very late?",
                {"{{le}}": q.buckets(ttft, WINDOW, streamed="yes")},
                "s",
                kind=Kind.HEATMAP,
            ),
            Panel(
                "Inter-token latency",
                "How evenly do answers flow? Measured in the decode engines.",
                q.quantiles("ray_vllm_inter_token_latency_seconds", 0.5, 0.9, 0.99),
                "s",
            ),
            Panel(
                "Goodput",
                f"How many streams a second begin within {in_time} s, of how many that begin?",
                {"in time": good, "all": streams},
                "reqps",
            ),
            Panel(
                "TTFT budget burn",
                "How many times faster than allowed are late streams spending the error budget? "
                f"Above {alerts.t('burn_fast')} over an hour, somebody is called.",
                {w: f"{alerts.slow_share(w)} / {budget:g}" for w in ("1h", "6h")},
                limits=("burn_slow", "burn_fast"),
                alerts=("TtftBurnsFast", "TtftBurnsSlowly"),
            ),
            Panel(
                "Answers",
                "What are requests answered? 499 stands for clients that hung up.",
                {"{{status}}": q.rate("ray_headrace_gateway_requests_total", WINDOW, "status")},
                "reqps",
            ),
            Panel(
                "Errors",
                "Which share of requests ends in a 5xx, or in an error amid a stream?",
                {"errors": q.share(alerts.failed_requests(WINDOW), alerts.requests(WINDOW))},
                "percentunit",
                limits=("errors",),
                alerts=("Errors",),
            ),
            Panel(
                "Tokens",
                "How much work is done? Prompt tokens include those that were not computed.",
                {
                    "answers": q.rate("ray_vllm_generation_tokens_total", WINDOW),
                    "prompts": q.rate("ray_headrace_plan_prompt_tokens_total", WINDOW, kind="all"),
                },
                "short",
            ),
            Panel(
                "Our own share",
                "How much of the time to the first token do gateway and planning add themselves?",
                {
                    "gateway p99": q.quantile(
                        0.99, "ray_headrace_gateway_overhead_seconds", WINDOW
                    ),
                    "plan p99": q.quantile(0.99, "ray_headrace_planning_seconds", WINDOW),
                },
                "s",
            ),
        ),
    )
