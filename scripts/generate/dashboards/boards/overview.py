"""The first dashboard, of one screen: whether users are served well, and where to look if not."""

from __future__ import annotations

from typing import Any

from scripts.generate.dashboards import alerts
from scripts.generate.dashboards import promql as q
from scripts.generate.dashboards.filters import HEALTHY, READY
from scripts.generate.dashboards.panel import HEALTH, DashboardSpec, Kind, Panel
from scripts.generate.dashboards.promql import CLUSTER, WINDOW

FIRING = q.pick("ALERTS", app="headrace", alertstate="firing")
TTFT = "ray_headrace_gateway_ttft_seconds"
ONE = f"{{{{{CLUSTER}}}}}"
"""Legend of a number: Grafana shows it only if several Ray clusters are chosen."""


def overview() -> DashboardSpec:
    """Return the dashboard."""
    return DashboardSpec(
        "headrace-overview", "Headrace: overview", (*_health(), *_work(), *_lists(), *_history())
    )


def _health() -> tuple[Panel, ...]:
    targets = q.most("ray_serve_autoscaling_target_replicas", "deployment")
    missing = f"clamp_min({targets} - {q.total(HEALTHY, 'deployment')}, 0)"
    return (
        _number(
            "Alerts that fire",
            "Is anything wrong? The list below has each alert.",
            f"count({FIRING}) or vector(0)",
            limits=("any",),
        ),
        _number(
            "Ready decode replicas",
            "Can requests be answered? The smallest number that a gateway can ask.",
            f"min by ({CLUSTER}) ({READY})",
            limits=("any",),
            is_good_above=True,
            alerts=("Down",),
        ),
        _number(
            "Replicas missing",
            "How many replicas of all roles should run, and are not healthy?",
            q.total(missing),
        ),
        _number(
            "Errors",
            "Which share of the last 5 minutes' requests ended in an error of ours?",
            alerts.errors("5m"),
            "percentunit",
            limits=("errors",),
            alerts=("Errors",),
            if_empty="none",
        ),
        _number(
            "Refused",
            "Which share of the last 10 minutes' requests was refused with 429?",
            alerts.refused("10m"),
            "percentunit",
            limits=("refused",),
            alerts=("Refuses",),
            if_empty="none",
        ),
        Panel(
            "KV cache in use",
            "How full is the fullest engine? At 100 % it preempts.",
            {ONE: q.most("ray_vllm_kv_cache_usage_perc")},
            "percentunit",
            1,
            kind=Kind.GAUGE,
        ),
    )


def _work() -> tuple[Panel, ...]:
    tokens = "ray_headrace_plan_prompt_tokens_total"
    prompts, reused = (q.rate(tokens, WINDOW, kind=kind) for kind in ("all", "reused"))
    return (
        _number(
            "Requests", "How many requests a second are answered?", alerts.requests(WINDOW), "reqps"
        ),
        _number(
            "Answer tokens",
            "How many tokens a second are generated?",
            q.rate("ray_vllm_generation_tokens_total", WINDOW),
        ),
        _number(
            "TTFT p50",
            "How long does the first token of a usual stream take?",
            q.quantile(0.5, TTFT, WINDOW, streamed="yes"),
            "s",
        ),
        _number(
            "TTFT p99",
            "How long does the first token of the slowest streams take?",
            q.quantile(0.99, TTFT, WINDOW, streamed="yes"),
            "s",
            limits=("ttft_s",),
            alerts=("TtftBurnsFast", "TtftBurnsSlowly"),
        ),
        _number(
            "Inter-token latency p99",
            "How long are the longest pauses between two tokens?",
            q.quantile(0.99, "ray_vllm_inter_token_latency_seconds", WINDOW),
            "s",
        ),
        _number(
            "KV hit rate",
            "Which share of the prompt tokens was not computed, but cached or loaded?",
            q.share(reused, prompts),
            "percentunit",
        ),
    )


def _lists() -> tuple[Panel, ...]:
    return (
        Panel(
            "Health of the replicas",
            "Which replicas fail their health checks, or come and go?",
            {"{{deployment}} {{replica}}": q.most(HEALTHY, "deployment", "replica")},
            kind=Kind.STATE_TIMELINE,
            states=HEALTH,
            size=(12, 6),
        ),
        Panel(
            "Firing alerts",
            "What is wrong, and what helps? The name links to the entry in the runbook.",
            {"": q.most(FIRING, "alertname", "severity", "runbook")},
            kind=Kind.TABLE,
            if_empty="No alert fires.",
            size=(12, 6),
        ),
    )


def _history() -> tuple[Panel, ...]:
    return (
        Panel(
            "Requests by status",
            "What are requests answered? 499 stands for clients that hung up.",
            {"{{status}}": q.rate("ray_headrace_gateway_requests_total", WINDOW, "status")},
            "reqps",
            size=(8, 6),
        ),
        Panel(
            "Time to first token",
            "Has the wait for the first token changed?",
            q.quantiles(TTFT, 0.5, 0.99, streamed="yes"),
            "s",
            limits=("ttft_s",),
            size=(8, 6),
        ),
        Panel(
            "Queue",
            "Do requests wait in the engines, and do they become more?",
            {what: q.total(f"ray_vllm_num_requests_{what}") for what in ("running", "waiting")},
            alerts=("QueueGrows",),
            size=(8, 6),
        ),
    )


def _number(title: str, asks: str, query: str, unit: str = "short", **more: Any) -> Panel:
    return Panel(title, asks, {ONE: query}, unit, kind=Kind.STAT, **more)
