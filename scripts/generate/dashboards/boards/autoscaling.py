"""The dashboard of autoscaling: the number of replicas, beside the load."""

from __future__ import annotations

from scripts.generate.dashboards import alerts
from scripts.generate.dashboards import promql as q
from scripts.generate.dashboards.filters import HEALTHY
from scripts.generate.dashboards.panel import HEALTH, DashboardSpec, Kind, Panel
from scripts.generate.dashboards.promql import WINDOW

STARTUP = "ray_serve_replica_startup_latency_ms"


def autoscaling() -> DashboardSpec:
    """Return the dashboard."""
    healthy = q.total(HEALTHY, "deployment")
    return DashboardSpec(
        "headrace-autoscaling",
        "Headrace: autoscaling",
        (
            Panel(
                "Replicas",
                "Does each role have as many healthy replicas as it should?",
                {
                    "{{deployment}} wanted": q.most(
                        "ray_serve_autoscaling_target_replicas", "deployment"
                    ),
                    "{{deployment}} healthy": healthy,
                },
            ),
            Panel(
                "Replicas that the policy asks for",
                "What would the policy have without the bounds? Needs `autoscaling` at the role.",
                {"{{deployment}}": q.most("ray_serve_autoscaling_desired_replicas", "deployment")},
            ),
            Panel(
                "Load",
                "Which load do the replicas have to follow?",
                {"requests": alerts.requests(WINDOW)},
                "reqps",
            ),
            Panel(
                "Requests for each healthy replica",
                "Is the load of a replica even while their number changes?",
                {
                    f"{{{{deployment}}}} {what}": q.share(
                        q.total(q.with_role(f"ray_vllm_num_requests_{what}"), "deployment"), healthy
                    )
                    for what in ("running", "waiting")
                },
                alerts=("QueueGrows",),
            ),
            Panel(
                "Time to first token",
                "Do users wait while replicas start?",
                q.quantiles("ray_headrace_gateway_ttft_seconds", 0.5, 0.99, streamed="yes"),
                "s",
                limits=("ttft_s",),
                alerts=("TtftBurnsFast",),
            ),
            Panel(
                "Inter-token latency",
                "Do the decode engines keep the pace with so few replicas?",
                q.quantiles("ray_vllm_inter_token_latency_seconds", 0.5, 0.99),
                "s",
            ),
            Panel(
                "Time of a start",
                "How far ahead of the load must a replica be started? Mean of the last hour.",
                {"{{deployment}}": q.mean(STARTUP, "1h", "deployment")},
                "ms",
            ),
            Panel(
                "Replica starts in 15 minutes",
                "Do numbers go up and down too often, or do replicas crash?",
                {"{{deployment}}": alerts.starts("15m")},
                limits=("restarts",),
                alerts=("ReplicasRestart",),
            ),
            Panel(
                "Health of the replicas",
                "When did replicas come and go?",
                {"{{deployment}} {{replica}}": q.most(HEALTHY, "deployment", "replica")},
                kind=Kind.STATE_TIMELINE,
                states=HEALTH,
                size=(24, 8),
            ),
        ),
    )
