"""The alerts: rule groups of Prometheus, which the chart wraps as a PrometheusRule.

Each threshold has its reason beside it. Each alert has an entry of its name in docs/runbook.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from scripts.generate.dashboards import promql as q
from scripts.generate.dashboards.promql import CLUSTER

RUNBOOK = "docs/runbook.md"
"""Path in the repository. The chart's `monitoring.runbookUrl` takes its place."""


class Threshold(NamedTuple):
    """A constant, and why it is not another."""

    value: float
    why: str


T = {
    "any": Threshold(0, "one is a fault already"),
    "ttft_s": Threshold(
        1.6, "a reader waits that long without wondering; must be a bucket of the TTFT histogram"
    ),
    "ttft_objective": Threshold(0.99, "of streams; leaves a budget of 1 in 100"),
    "burn_fast": Threshold(14.4, "spends 2 % of a month's budget in an hour (SRE workbook, ch. 5)"),
    "burn_slow": Threshold(6.0, "spends 5 % of a month's budget in six hours (same)"),
    "errors": Threshold(0.01, "replays hide single faults, so 1 % means that they no longer do"),
    "fallbacks": Threshold(
        0.05, "a lost replica costs its requests once; 10 min are no single loss"
    ),
    "transfers": Threshold(3, "one failed transfer is a restart's; each costs a computed prompt"),
    "lost_blocks": Threshold(
        0.05, "of blocks to be loaded; fewer are evicted between offer and load"
    ),
    "waiting": Threshold(1.0, "waiting requests for each running one: they wait a whole turn"),
    "restarts": Threshold(2, "a role of one or two replicas may be replaced whole, once"),
    "silent_s": Threshold(5.0, "replicas report 5 times a second, and are not placed on after 2 s"),
    "wrong": Threshold(0.5, "of predictions off by more than twice: chance alone gives a tenth"),
    "wrong_least": Threshold(20, "predictions in 30 min; fewer say nothing"),
    "refused": Threshold(0.05, "a burst's edge is refused; 5 % for 10 min is too little room"),
    "streams_least": Threshold(20, "streams in the long window; of fewer, one late one is 5 %"),
    "errors_least": Threshold(0.02, "requests a second; at less, one error is a great share"),
}


def t(name: str) -> str:
    """Return a threshold in PromQL's form."""
    return f"{T[name].value:g}"


@dataclass(frozen=True)
class Alert:
    """One rule.

    Attributes:
        name: CamelCase; the runbook's heading.
        says: what is wrong, in one sentence, with the cluster and the value.
        after: how long it must hold.
        severity: `critical` where users feel it now, else `warning`.
    """

    name: str
    query: str
    says: str
    after: str
    severity: str = "warning"

    def rule(self) -> dict[str, Any]:
        """Return the alert in Prometheus' form."""
        return {
            "alert": f"Headrace{self.name}",
            "expr": self.query,
            "for": self.after,
            "labels": {"severity": self.severity, "app": "headrace", "runbook": self.anchor},
            "annotations": {"summary": self.says, "runbook_url": f"{RUNBOOK}#{self.anchor}"},
        }

    @property
    def anchor(self) -> str:
        """The anchor of its entry in the runbook; also a label, from which dashboards link."""
        return f"headrace{self.name.lower()}"


def slow_share(window: str) -> str:
    """Return the query of the share of streams whose first token came too late, over a window."""
    metric = "ray_headrace_gateway_ttft_seconds"
    good = q.rate(f"{metric}_bucket", window, streamed="yes", le=f"{T['ttft_s'].value:g}")
    return f"(1 - {q.share(good, q.rate(f'{metric}_count', window, streamed='yes'))})"


def burning(factor: str, long: str, short: str) -> str:
    """Return the query whether the TTFT's error budget is spent too fast, over a long window and
    over a short one."""
    budget = f"{t(factor)} * {1 - T['ttft_objective'].value:g}"
    streams = q.grown("ray_headrace_gateway_ttft_seconds_count", long, streamed="yes")
    return (
        f"{slow_share(long)} > {budget} and {slow_share(short)} > {budget} "
        f"and {streams} > {t('streams_least')}"
    )


def failed_requests(window: str) -> str:
    """Return the query of requests a second that failed: a 5xx, or an error in a stream."""
    answers = q.pick("ray_headrace_gateway_requests_total", status="~5..")
    streams = q.pick("ray_headrace_gateway_replica_losses_total", when="stream")
    return q.total(f"rate({answers}[{window}]) or rate({streams}[{window}])")


def requests(window: str) -> str:
    """Return the query of requests a second."""
    return q.rate("ray_headrace_gateway_requests_total", window)


def given_up(window: str) -> str:
    """Return the query of the share of remote prefills that were given up."""
    remote = q.rate("ray_headrace_plans_total", window, kind="remote")
    return q.share(q.rate("ray_headrace_remote_prefill_failures_total", window), remote)


def lost_blocks(window: str) -> str:
    """Return the query of the share of offered KV blocks that could not be loaded."""
    blocks = "ray_vllm_headrace_kv_blocks_total"
    tried = q.rate(blocks, window, event="~lost_.*|loaded_.*")
    return q.share(q.rate(blocks, window, event="~lost_.*"), tried)


def refused(window: str) -> str:
    """Return the query of the share of requests that are refused with 429."""
    refusals = q.rate("ray_headrace_gateway_refused_total", window, status="429")
    return f"{refusals} / ({requests(window)} > {t('errors_least')})"


def errors(window: str) -> str:
    """Return the query of the share of requests that fail."""
    return f"{failed_requests(window)} / ({requests(window)} > {t('errors_least')})"


def starts(window: str) -> str:
    """Return the query of the replicas that started within a window, by deployment."""
    metric = "ray_serve_deployment_replica_starts_total"
    new = f"count_over_time({metric}[{window}]) unless {metric} offset {window}"
    return f"count by ({CLUSTER}, deployment) ({new})"


def alerts() -> list[Alert]:
    """Return all alerts."""
    none_ready = f"{q.most('ray_headrace_gateway_ready_replicas')} == {t('any')}"
    targets = "ray_serve_autoscaling_target_replicas"
    wanted = q.most(q.pick(targets, deployment="~decode(-.*)?"))
    blocks = "ray_vllm_headrace_kv_blocks_total"
    corrupt = q.grown(blocks, "1h", event="~lost_corrupt_.*")
    wrong = q.pick("ray_vllm_headrace_transfers_total", event="unproved_content")
    # One is enough, and the first makes the series.
    wrong = q.total(f"increase({wrong}[1h]) > 0 or ({wrong} unless {wrong} offset 1h)")
    transfers = q.grown("ray_vllm_nixl_num_failed_transfers_total", "10m")
    waiting, running = (
        q.total(f"avg_over_time(ray_vllm_num_requests_{what}[5m])")
        for what in ("waiting", "running")
    )
    before = q.total("avg_over_time(ray_vllm_num_requests_waiting[5m] offset 10m)")
    ratio = "ray_headrace_plan_ttft_error_ratio"
    below, above = (q.rate(f"{ratio}_bucket", "30m", "kind", le=limit) for limit in ("0.5", "2.0"))
    count = q.rate(f"{ratio}_count", "30m", "kind")
    enough = q.grown(f"{ratio}_count", "30m", "kind")
    replicas = q.most(f"max_over_time({targets}[15m])", "deployment")
    return [
        Alert(
            "Down",
            f"absent(ray_headrace_gateway_ready_replicas) or ({none_ready} unless {wanted} == 0)",
            "No decode replica answers, or no gateway is seen.",
            "2m",
            "critical",
        ),
        Alert(
            "Errors",
            f"{errors('5m')} > {t('errors')}",
            "{{ $value | humanizePercentage }} of requests end in an error of ours.",
            "5m",
            "critical",
        ),
        Alert(
            "TtftBurnsFast",
            burning("burn_fast", "1h", "5m"),
            "{{ $value | humanizePercentage }} of the last hour's streams began late.",
            "2m",
            "critical",
        ),
        Alert(
            "TtftBurnsSlowly",
            burning("burn_slow", "6h", "30m"),
            "{{ $value | humanizePercentage }} of the last six hours' streams began late.",
            "15m",
        ),
        Alert(
            "PrefillFallsBack",
            f"{given_up('10m')} > {t('fallbacks')}",
            "{{ $value | humanizePercentage }} of remote prefills are given up, and done again.",
            "10m",
        ),
        Alert(
            "PrefillFailing",
            f"{q.most('ray_headrace_prefill_replicas_failing')} > {t('any')}",
            "{{ $value }} prefill replicas get no requests, because they fail.",
            "5m",
        ),
        Alert(
            "KvTransfersFail",
            f"{transfers} > {t('transfers')}",
            "{{ $value | humanize }} transfers of KV between engines failed in 10 minutes.",
            "5m",
        ),
        Alert(
            "KvBlocksLost",
            f"{lost_blocks('10m')} > {t('lost_blocks')}",
            "{{ $value | humanizePercentage }} of the KV blocks to be loaded did not come.",
            "10m",
        ),
        Alert(
            "KvCorrupt",
            f"{corrupt} > {t('any')}",
            "{{ $value | humanize }} KV blocks did not match their checksums in the last hour.",
            "0m",
        ),
        Alert(
            "KvWrong",
            f"{wrong} > {t('any')}",
            "{{ $value | humanize }} KV transfers of an hour differed from what was computed.",
            "0m",
        ),
        Alert(
            "StoreNodeGone",
            f"{q.most(q.pick('ray_headrace_store_nodes', up='no'))} > {t('any')}",
            "{{ $value }} machines have no store node that answers.",
            "5m",
        ),
        Alert(
            "TierOff",
            f"{q.total(q.pick('ray_headrace_store_tiers', state='!on'), 'tier')} > {t('any')}",
            "The {{ $labels.tier }} tier of {{ $value }} machines is read-only or off.",
            "5m",
        ),
        Alert(
            "ReplicasRestart",
            f"{starts('15m')} > clamp_min({replicas}, {t('restarts')})",
            "{{ $value }} {{ $labels.deployment }} replicas started in 15 minutes.",
            "0m",
            "critical",
        ),
        Alert(
            "ReplicaSilent",
            f"{q.most('ray_headrace_gateway_oldest_report_seconds')} > {t('silent_s')}",
            "A gateway has had no report from a replica for {{ $value | humanizeDuration }}.",
            "2m",
        ),
        Alert(
            "KeysStale",
            f"{q.most('ray_headrace_gateway_keys_stale')} > {t('any')}",
            "A gateway cannot read its changed key file: keys that were revoked stay valid.",
            "2m",
        ),
        Alert(
            "QueueGrows",
            f"{waiting} > {t('waiting')} * {running} and {waiting} > {before}",
            "{{ $value | humanize }} requests wait in the engines, and they become more.",
            "5m",
        ),
        Alert(
            "PredictionsWrong",
            f"1 - ({above} - {below}) / {count} > {t('wrong')} and {enough} > {t('wrong_least')}",
            "{{ $value | humanizePercentage }} of {{ $labels.kind }} plans took less than half or "
            "more than twice the predicted time.",
            "30m",
        ),
        Alert(
            "Refuses",
            f"{refused('10m')} > {t('refused')}",
            "{{ $value | humanizePercentage }} of requests are refused with 429.",
            "10m",
        ),
    ]


def groups() -> dict[str, Any]:
    """Return the rule file."""
    rules = [alert.rule() for alert in alerts()]
    return {"groups": [{"name": "headrace", "interval": "30s", "rules": rules}]}
