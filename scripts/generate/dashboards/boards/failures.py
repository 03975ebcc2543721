"""The dashboard of failures: missing replicas, and their effects on users."""

from __future__ import annotations

from scripts.generate.dashboards import alerts
from scripts.generate.dashboards import promql as q
from scripts.generate.dashboards.filters import HEALTHY, READY
from scripts.generate.dashboards.panel import HEALTH, DashboardSpec, Kind, Panel
from scripts.generate.dashboards.promql import CLUSTER, WINDOW


def failures() -> DashboardSpec:
    """Return the dashboard."""
    targets = q.most("ray_serve_autoscaling_target_replicas", "deployment")
    healthy = q.total(HEALTHY, "deployment")
    return DashboardSpec(
        "headrace-failures",
        "Headrace: failures",
        (
            Panel(
                "Health of the replicas",
                "Which replicas fail their health checks, or come and go?",
                {"{{deployment}} {{replica}}": q.most(HEALTHY, "deployment", "replica")},
                kind=Kind.STATE_TIMELINE,
                states=HEALTH,
            ),
            Panel(
                "Replicas missing",
                "Which deployments have fewer healthy replicas than they should?",
                {"{{deployment}}": f"clamp_min({targets} - {healthy}, 0)"},
            ),
            Panel(
                "Replica starts in 15 minutes",
                "Do replicas restart again and again? A new version starts each once.",
                {"{{deployment}}": alerts.starts("15m")},
                limits=("restarts",),
                alerts=("ReplicasRestart",),
            ),
            Panel(
                "Decode replicas that answer",
                "Whom can the gateways ask?",
                {
                    "least": f"min by ({CLUSTER}) ({READY})",
                    "most": q.most(READY),
                },
                limits=("any",),
                is_good_above=True,
                alerts=("Down",),
            ),
            Panel(
                "Requests whose replica was lost",
                "Do users notice lost replicas? Only `stream` does harm; others are sent again.",
                {"{{when}}": q.rate("ray_headrace_gateway_replica_losses_total", WINDOW, "when")},
                "reqps",
            ),
            Panel(
                "Refused",
                "What does the gateway refuse, and why? 429: no room; 401: keys; 503: no replica.",
                {
                    "{{status}} {{code}}": q.rate(
                        "ray_headrace_gateway_refused_total", WINDOW, "status", "code"
                    )
                },
                "reqps",
                alerts=("Errors", "Refuses"),
            ),
            Panel(
                "Remote prefills given up",
                "Which share of remote prefills does a decode replica have to compute itself?",
                {"given up": alerts.given_up("10m")},
                "percentunit",
                limits=("fallbacks",),
                alerts=("PrefillFallsBack",),
            ),
            Panel(
                "Failing prefill replicas",
                "How many circuit breakers are open? They close again when a probe passes.",
                {"most, of a decode replica": q.most("ray_headrace_prefill_replicas_failing")},
                limits=("any",),
                alerts=("PrefillFailing",),
            ),
            Panel(
                "KV that did not come",
                "Do transfers between engines or questions to the store fail?",
                {
                    "NIXL transfers": q.rate("ray_vllm_nixl_num_failed_transfers_total", WINDOW),
                    "NIXL notifications": q.rate(
                        "ray_vllm_nixl_num_failed_notifications_total", WINDOW
                    ),
                    "expired before fetched": q.rate(
                        "ray_vllm_nixl_num_kv_expired_reqs_total", WINDOW
                    ),
                    "not used: {{event}}": q.rate(
                        "ray_vllm_headrace_transfers_total", WINDOW, "event", event="~unproved_.*"
                    ),
                    "questions: {{kind}}": q.rate(
                        "ray_headrace_kv_lookup_failures_total", WINDOW, "kind"
                    ),
                },
                "ops",
                alerts=("KvTransfersFail", "KvWrong"),
            ),
            Panel(
                "Share of KV blocks lost",
                "Which share of the blocks that the store offered did not come?",
                {"lost": alerts.lost_blocks("10m")},
                "percentunit",
                limits=("lost_blocks",),
                alerts=("KvBlocksLost",),
            ),
        ),
    )
