"""The dashboard of placement: where prompts are computed, and how good the plans are."""

from __future__ import annotations

from scripts.generate.dashboards import promql as q
from scripts.generate.dashboards.panel import DashboardSpec, Panel
from scripts.generate.dashboards.promql import WINDOW


def placement() -> DashboardSpec:
    """Return the dashboard."""
    ratio = "ray_headrace_plan_ttft_error_ratio"
    tokens = "ray_headrace_plan_prompt_tokens_total"
    prompts = q.rate(tokens, WINDOW, kind="all")
    return DashboardSpec(
        "headrace-placement",
        "Headrace: placement",
        (
            Panel(
                "Plans",
                "Are prompts computed in decode engines (local) or prefill engines (remote)?",
                {"{{kind}}": q.rate("ray_headrace_plans_total", WINDOW, "kind")},
                "reqps",
            ),
            Panel(
                "Measured over predicted TTFT",
                "Can the plans be trusted? 1 is right; an alert counts those below 0.5 or above 2.",
                {
                    "{{kind}} p50": q.quantile(0.5, ratio, WINDOW, "kind"),
                    "{{kind}} p90": q.quantile(0.9, ratio, WINDOW, "kind"),
                },
                alerts=("PredictionsWrong",),
            ),
            Panel(
                "Hits",
                "Of the prompt tokens that were held somewhere, how many were not computed again?",
                {
                    kind: q.share(q.rate(tokens, WINDOW, kind=kind), prompts)
                    for kind in ("cached", "reused")
                },
                "percentunit",
                1,
            ),
            Panel(
                "Queues",
                "Do requests wait in the engines, and in those of which role?",
                {
                    f"{{{{deployment}}}} {what}": q.total(
                        q.with_role(f"ray_vllm_num_requests_{what}"), "deployment"
                    )
                    for what in ("running", "waiting")
                },
                alerts=("QueueGrows",),
            ),
            Panel(
                "KV cache in use",
                "How full is the fullest engine of each role? At 100 % it preempts.",
                {
                    "{{deployment}}": q.most(
                        q.with_role("ray_vllm_kv_cache_usage_perc"), "deployment"
                    )
                },
                "percentunit",
                1,
            ),
            Panel(
                "Age of the oldest report",
                "Do gateways plan with fresh reports? A replica silent for 2 s is not placed on.",
                {"oldest": q.most("ray_headrace_gateway_oldest_report_seconds")},
                "s",
                limits=("silent_s",),
                alerts=("ReplicaSilent",),
            ),
            Panel(
                "Replaced plans",
                "How many gateways' plans were out of date when the replica got them?",
                {"replaced": q.rate("ray_headrace_plans_replaced_total", WINDOW)},
                "reqps",
            ),
        ),
    )
