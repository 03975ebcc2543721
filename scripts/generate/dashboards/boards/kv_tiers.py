"""The dashboard of the KV tiers: where prompt tokens come from, and the state of the store."""

from __future__ import annotations

from scripts.generate.dashboards import promql as q
from scripts.generate.dashboards.panel import DashboardSpec, Panel
from scripts.generate.dashboards.promql import WINDOW


def kv_tiers() -> DashboardSpec:
    """Return the dashboard."""
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
                alerts=("KvCorrupt",),
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
                q.quantiles("ray_vllm_nixl_xfer_time_seconds", 0.5, 0.99),
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
                limits=("any",),
                alerts=("StoreNodeGone", "TierOff"),
            ),
            Panel(
                "Waiting to be written",
                "Does the disk keep up with what is computed? What does not fit is not written.",
                {"bytes": q.most("ray_headrace_store_backlog_bytes")},
                "bytes",
            ),
        ),
    )
