"""The dashboard of tenants and admission: load, waits and refusals."""

from __future__ import annotations

from scripts.generate.dashboards import alerts
from scripts.generate.dashboards import promql as q
from scripts.generate.dashboards.filters import TENANTS
from scripts.generate.dashboards.panel import DashboardSpec, Kind, Panel
from scripts.generate.dashboards.promql import WINDOW

TOKENS = "ray_headrace_gateway_tenant_tokens_total"
USAGE = "ray_headrace_usage_total"
QUEUED = "ray_headrace_gateway_queue_seconds"


def tenants() -> DashboardSpec:
    """Return the dashboard."""
    answered = q.rate(TENANTS, "10m", "tenant")
    refused, failed = (q.rate(TENANTS, "10m", "tenant", status=of) for of in ("429", "~5.."))
    return DashboardSpec(
        "headrace-tenants",
        "Headrace: tenants and admission",
        (
            Panel(
                "Tenants in the last 10 minutes",
                "Who sends the load, and who is refused? Without API keys there are no tenants.",
                {
                    "requests a second": answered,
                    "answer tokens a second": q.rate(TOKENS, "10m", "tenant"),
                    "refused": q.share(refused, answered),
                    "failed": q.share(failed, answered),
                },
                kind=Kind.TABLE,
                units={"refused": "percentunit", "failed": "percentunit"},
            ),
            Panel(
                "Requests by tenant",
                "Whose load has changed?",
                {"{{tenant}}": q.rate(TENANTS, WINDOW, "tenant")},
                "reqps",
            ),
            Panel(
                "Engine time by tenant",
                "For whom do the engines work, in engine seconds a second? See docs/usage.md.",
                {"{{tenant}}": q.rate(USAGE, WINDOW, "tenant", quantity="engine_s")},
            ),
            Panel(
                "Refused requests by tenant",
                "Who is told to try again (429)?",
                {"{{tenant}}": q.rate(TENANTS, WINDOW, "tenant", status="429")},
                "reqps",
            ),
            Panel(
                "Refused share",
                "Which share of all requests is refused with 429?",
                {"refused": alerts.refused("10m")},
                "percentunit",
                limits=("refused",),
                alerts=("Refuses",),
            ),
            Panel(
                "Reasons of refusals",
                "Why are requests refused: no room, a key's own limit, or a queue too long?",
                {
                    "{{code}}": q.rate(
                        "ray_headrace_gateway_refused_total", WINDOW, "code", status="429"
                    )
                },
                "reqps",
            ),
            Panel(
                "Wait in the queue, by class",
                "How long does admission let the requests of an SLO class wait?",
                {
                    f"{{{{slo}}}} p{100 * at:g}": q.quantile(at, QUEUED, WINDOW, "slo")
                    for at in (0.5, 0.99)
                },
                "s",
            ),
            Panel(
                "Queue at the gateways",
                "How many requests wait for admission? Needs `gateway.admission`.",
                {
                    "waiting": q.total("ray_headrace_gateway_queue_length"),
                    "in flight": q.total("ray_headrace_gateway_requests_in_flight"),
                },
            ),
            Panel(
                "Predicted wait",
                "How long would the last request of the queue wait, as far as one can tell?",
                {"longest": q.most("ray_headrace_gateway_predicted_wait_seconds")},
                "s",
            ),
            Panel(
                "Stale key files",
                "Are revoked keys refused? 1: a gateway cannot read its changed key file.",
                {"stale": q.most("ray_headrace_gateway_keys_stale")},
                limits=("any",),
                alerts=("KeysStale",),
            ),
        ),
    )
