"""The five dashboards. Each panel answers the question that its description asks."""

from __future__ import annotations

from headrace.observability.dashboards import alerts
from headrace.observability.dashboards import promql as q
from headrace.observability.dashboards.grafana import DashboardSpec, Panel
from headrace.observability.dashboards.promql import CLUSTER

WINDOW = "$__rate_interval"


def _quantiles(histogram: str, *quantiles: float, **labels: str) -> dict[str, str]:
    return {f"p{100 * at:g}": q.quantile(at, histogram, WINDOW, **labels) for at in quantiles}


def _slos() -> DashboardSpec:
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
                _quantiles(ttft, 0.5, 0.9, 0.99, streamed="yes"),
                "s",
            ),
            Panel(
                "Inter-token latency",
                "How evenly do answers flow? Measured in the decode engines.",
                _quantiles("ray_vllm_inter_token_latency_seconds", 0.5, 0.9, 0.99),
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


def _placement() -> DashboardSpec:
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
                "Regret",
                "How much did choices cost above the next best one, of all that plans cost?",
                {
                    "regret": q.share(
                        q.rate("ray_headrace_plan_regret_seconds_total", WINDOW),
                        q.rate("ray_headrace_plan_cost_seconds_total", WINDOW),
                    )
                },
                "percentunit",
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
            ),
            Panel(
                "Replaced plans",
                "How many gateways' plans were out of date when the replica got them?",
                {"replaced": q.rate("ray_headrace_plans_replaced_total", WINDOW)},
                "reqps",
            ),
        ),
    )


def _tiers() -> DashboardSpec:
    # The engines' own counters have a prompt that one role prefills for the other twice.
    tokens = "ray_headrace_plan_prompt_tokens_total"
    prompts, reused = (q.rate(tokens, WINDOW, kind=kind) for kind in ("all", "reused"))
    blocks = "ray_vllm_headrace_kv_blocks_total"
    events = "ray_headrace_store_block_events_total"
    size = q.total("ray_headrace_store_size_bytes", "tier")
    return DashboardSpec(
        "headrace-tiers",
        "Headrace: KV tiers",
        (
            Panel(
                "Where prompt tokens come from",
                "How much is computed, and how much is cached or loaded from the store?",
                {
                    "computed": q.share(f"({prompts} - {reused})", prompts),
                    "cached or loaded": q.share(reused, prompts),
                },
                "percentunit",
                1,
            ),
            Panel(
                "Blocks loaded and saved",
                "Is the store used, and from which medium?",
                {"{{event}}": q.rate(blocks, WINDOW, "event", event="~loaded_.*|saved")},
                "ops",
            ),
            Panel(
                "Room in use",
                "How full is each tier, over all machines? DRAM is meant to be full.",
                {
                    "{{tier}}": q.share(q.total("ray_headrace_store_bytes", "tier"), size),
                },
                "percentunit",
                1,
            ),
            Panel(
                "Evictions",
                "Does a tier forget faster than it is used? Then it is too small.",
                {
                    "{{tier}} {{event}}": q.rate(
                        events, WINDOW, "tier", "event", event="~evicted|stored"
                    )
                },
                "ops",
            ),
            Panel(
                "Blocks lost, declined or not saved",
                "Which blocks had to be computed although they were held, and why?",
                {
                    "{{event}}": q.rate(
                        blocks, WINDOW, "event", event="~lost_.*|declined_.*|save_.*"
                    )
                },
                "ops",
            ),
            Panel(
                "Faults of the tiers",
                "Do disks or object stores fail?",
                {
                    "{{tier}} {{event}}": q.rate(
                        events, WINDOW, "tier", "event", event="~.*_failed|corrupt|breaker_opened"
                    )
                },
                "ops",
            ),
            Panel(
                "KV between engines",
                "How much KV moves from prefill to decode engines over NIXL?",
                {"bytes": q.rate("ray_vllm_nixl_bytes_transferred_sum", WINDOW)},
                "Bps",
            ),
            Panel(
                "A transfer's time",
                "Does the network keep up?",
                _quantiles("ray_vllm_nixl_xfer_time_seconds", 0.5, 0.99),
                "s",
            ),
            Panel(
                "Machines",
                "Does each machine have its store node, its tiers and its peers?",
                {
                    "no node": q.most(q.pick("ray_headrace_store_nodes", up="no")),
                    "{{tier}} {{state}}": q.total(
                        q.pick("ray_headrace_store_tiers", state="!on"), "tier", "state"
                    ),
                    "peers down": q.most(q.pick("ray_headrace_store_peers", state="down")),
                },
            ),
            Panel(
                "Waiting to be written",
                "Does the disk keep up with what is computed? What does not fit is not written.",
                {"bytes": q.most("ray_headrace_store_backlog_bytes")},
                "bytes",
            ),
        ),
    )


def _speculation() -> DashboardSpec:
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


def _failures() -> DashboardSpec:
    targets = q.most("ray_serve_autoscaling_target_replicas", "deployment")
    healthy = q.total("ray_serve_deployment_replica_healthy", "deployment")
    return DashboardSpec(
        "headrace-failures",
        "Headrace: failures",
        (
            Panel(
                "Replicas missing",
                "Which deployments have fewer healthy replicas than they should?",
                {"{{deployment}}": f"clamp_min({targets} - {healthy}, 0)"},
            ),
            Panel(
                "Replica starts in 15 minutes",
                "Do replicas restart again and again? A new version starts each once.",
                {"{{deployment}}": alerts.starts("15m")},
            ),
            Panel(
                "Decode replicas that answer",
                "Whom can the gateways ask?",
                {
                    "least": f"min by ({CLUSTER}) (ray_headrace_gateway_ready_replicas)",
                    "most": q.most("ray_headrace_gateway_ready_replicas"),
                },
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
            ),
            Panel(
                "Remote prefills given up",
                "How often does a decode replica compute what a prefill replica should have?",
                {"given up": q.rate("ray_headrace_remote_prefill_failures_total", WINDOW)},
                "reqps",
            ),
            Panel(
                "Failing prefill replicas",
                "How many circuit breakers are open? They close again when a probe passes.",
                {"most, of a decode replica": q.most("ray_headrace_prefill_replicas_failing")},
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
            ),
        ),
    )


def dashboards() -> list[DashboardSpec]:
    """Return all dashboards."""
    return [_slos(), _placement(), _tiers(), _speculation(), _failures()]
