"""The alerts as Prometheus judges them: each fires on its fault, alone; none on a healthy app."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from scripts.generate.dashboards.alerts import RUNBOOK, alerts
from tests.support.program import ROOT
from tests.support.tools import missing

RULES = ROOT / "helm" / "headrace" / "files" / "alerts.yaml"
END = 150
"""Minutes; longer windows see all of them. Faults last from an hour before that, unless said."""
FAULT = 60
Series = dict[str, str]


def promtool(*arguments: str) -> None:
    """Run it; what it finds wrong fails the test."""
    program = shutil.which("promtool")
    if program is None:
        missing("promtool", "apt-get install -y prometheus")
    done = subprocess.run([str(program), *arguments], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


def steady(value: float, fault: float | None = None, minutes: int = FAULT) -> str:
    """A gauge, and what it is in the last minutes."""
    if fault is None:
        return f"{value}x{END}"
    return f"{value}x{END - minutes - 1} {fault}x{minutes}"


def counts(a_minute: float, fault: float | None = None, minutes: int = FAULT) -> str:
    """A counter that grows so fast, and faster or slower in the last minutes."""
    if fault is None:
        return f"0+{a_minute}x{END}"
    before = END - minutes
    return f"0+{a_minute}x{before - 1} {a_minute * before:g}+{fault}x{minutes}"


def series(metric: str, **labels: str) -> str:
    matchers = ", ".join(f'{name}="{value}"' for name, value in labels.items())
    return f'ray_{metric}{{SessionName="s", {matchers}}}'


READY = series("headrace_gateway_ready_replicas")
DECODES = series("serve_autoscaling_target_replicas", deployment="decode")
ANSWERED = series("headrace_gateway_requests_total", path="/v1/completions", status="200")
FAILED = series("headrace_gateway_requests_total", path="/v1/completions", status="502")
STREAMS = series("headrace_gateway_ttft_seconds_count", streamed="yes")
IN_TIME = series("headrace_gateway_ttft_seconds_bucket", streamed="yes", le="1.6")
BROKEN = series("headrace_gateway_replica_losses_total", when="stream")
GIVEN_UP = series("headrace_remote_prefill_failures_total")
PREFILL_FAILING = series("headrace_prefill_replicas_failing")
TRANSFERS = series("vllm_nixl_num_failed_transfers_total", ReplicaId="d")
WAITING = series("vllm_num_requests_waiting", ReplicaId="d")
RATIO = "headrace_plan_ttft_error_ratio"
WRONG = series("vllm_headrace_transfers_total", event="unproved_content")
REFUSED = series("headrace_gateway_refused_total", status="429", code="too_many_requests")
OLDEST = series("headrace_gateway_oldest_report_seconds")
KEYS_STALE = series("headrace_gateway_keys_stale")


def blocks(event: str) -> str:
    return series("vllm_headrace_kv_blocks_total", ReplicaId="d", event=event)


def nodes(up: str) -> str:
    return series("headrace_store_nodes", up=up)


def tiers(tier: str, state: str) -> str:
    return series("headrace_store_tiers", tier=tier, state=state)


def started(replica: str) -> str:
    return series("serve_deployment_replica_starts_total", deployment="decode", replica=replica)


HEALTHY: Series = {
    READY: steady(2),
    DECODES: steady(2),
    started("a"): steady(1),
    started("b"): steady(1),
    ANSWERED: counts(600),
    FAILED: counts(1),
    STREAMS: counts(600),
    IN_TIME: counts(598),
    BROKEN: counts(1),
    series("headrace_plans_total", kind="remote"): counts(300),
    series("headrace_plans_total", kind="local"): counts(300),
    GIVEN_UP: counts(1),
    PREFILL_FAILING: steady(0),
    TRANSFERS: counts(0.1),
    blocks("loaded_dram"): counts(100),
    blocks("lost_gone"): counts(1),
    blocks("lost_corrupt_nvme"): counts(0),
    series("vllm_headrace_transfers_total", event="proved"): counts(300),
    nodes("yes"): steady(2),
    nodes("no"): steady(0),
    tiers("nvme", "on"): steady(2),
    tiers("nvme", "read-only"): steady(0),
    tiers("nvme", "off"): steady(0),
    OLDEST: steady(0.2),
    KEYS_STALE: steady(0),
    series("vllm_num_requests_running", ReplicaId="d"): steady(8),
    WAITING: steady(2),
    series(f"{RATIO}_bucket", kind="remote", le="0.5"): counts(10),
    series(f"{RATIO}_bucket", kind="remote", le="2.0"): counts(290),
    series(f"{RATIO}_count", kind="remote"): counts(300),
    REFUSED: counts(3),
}


class Case(NamedTuple):
    """What differs from a healthy app; without a value, the series is not there."""

    fires: tuple[str, ...]
    differs: dict[str, str | None]


def gone(value: float, minutes: int) -> str:
    """A series that ends so many minutes before the end."""
    return f"{value}x{END - minutes} stale"


def fresh(minutes: int, lasts: int) -> str:
    """A replica that starts so many minutes before the end, and how long it lives."""
    return f"_x{END - minutes} 1x{lasts} stale"


CASES = {
    "healthy": Case((), {}),
    # Faults
    "no replica answers": Case(("Down",), {READY: steady(2, 0, 5)}),
    "nothing is scraped": Case(("Down",), dict.fromkeys(HEALTHY)),
    "answers are errors": Case(("Errors",), {FAILED: counts(1, 30, 20)}),
    "streams break": Case(("Errors",), {BROKEN: counts(1, 30, 20)}),
    "streams begin late": Case(("TtftBurnsFast", "TtftBurnsSlowly"), {IN_TIME: counts(598, 300)}),
    "some streams begin late for long": Case(
        ("TtftBurnsSlowly",), {IN_TIME: counts(598, 540, 140)}
    ),
    "prefill replicas fail": Case(("PrefillFallsBack",), {GIVEN_UP: counts(1, 30)}),
    "a breaker stays open": Case(("PrefillFailing",), {PREFILL_FAILING: steady(0, 1, 10)}),
    "transfers fail": Case(("KvTransfersFail",), {TRANSFERS: counts(0.1, 2, 20)}),
    "blocks do not come": Case(("KvBlocksLost",), {blocks("lost_gone"): counts(1, 50)}),
    "blocks are damaged": Case(("KvCorrupt",), {blocks("lost_corrupt_nvme"): counts(0, 0.1)}),
    "transferred blocks differ": Case(("KvWrong",), {WRONG: counts(0, 0.1)}),
    "a first transferred block differs": Case(("KvWrong",), {WRONG: fresh(20, 20)}),
    "a store node is gone": Case(
        ("StoreNodeGone",), {nodes("yes"): steady(2, 1, 10), nodes("no"): steady(0, 1, 10)}
    ),
    "a disk is full of errors": Case(
        ("TierOff",),
        {tiers("nvme", "on"): steady(2, 1, 10), tiers("nvme", "off"): steady(0, 1, 10)},
    ),
    "a disk is read-only": Case(
        ("TierOff",),
        {tiers("nvme", "on"): steady(2, 1, 10), tiers("nvme", "read-only"): steady(0, 1, 10)},
    ),
    "a replica restarts again and again": Case(
        ("ReplicasRestart",), {started(f"new-{at}"): fresh(12 - 3 * at, 3) for at in range(4)}
    ),
    "a replica is silent": Case(("ReplicaSilent",), {OLDEST: steady(0.2, 9, 5)}),
    "a key file cannot be read": Case(("KeysStale",), {KEYS_STALE: steady(0, 1, 5)}),
    "the queue grows": Case(("QueueGrows",), {WAITING: f"2x{END - 31} 2+2x30"}),
    "predictions are wrong": Case(
        ("PredictionsWrong",),
        {series(f"{RATIO}_bucket", kind="remote", le="2.0"): counts(290, 60, 90)},
    ),
    "there is no room": Case(("Refuses",), {REFUSED: counts(3, 90)}),
    # No faults
    "scaled to zero": Case((), {READY: steady(2, 0), DECODES: steady(2, 0)}),
    "a new version": Case(
        (),
        {
            started("a"): gone(1, 8),
            started("b"): gone(1, 5),
            started("c"): fresh(8, 8),
            started("d"): fresh(5, 5),
        },
    ),
    "errors for two minutes": Case((), {FAILED: counts(1, 100, 2)}),
    "one late stream of three in a quiet hour": Case(
        (), {STREAMS: counts(0, 0.05), IN_TIME: counts(0, 0.03)}
    ),
    "one request in an hour, and it fails": Case(
        (), {ANSWERED: None, FAILED: counts(0, 0.02), BROKEN: None, REFUSED: None}
    ),
    "a breaker opens for a minute": Case((), {PREFILL_FAILING: steady(0, 1, 1)}),
    "a burst waits and goes": Case((), {WAITING: f"2x{END - 20} 40x5 2x15"}),
    "a burst is refused": Case((), {REFUSED: counts(3, 200, 1)}),
}


def test_every_alert_has_a_fault() -> None:
    assert {name for case in CASES.values() for name in case.fires} == {a.name for a in alerts()}


def a_group(cases: list[str]) -> dict[str, Any]:
    """One of promtool's tests: a Prometheus that sees a cluster for each of these cases."""
    told, there = [], []
    for name in cases:
        case = CASES[name]
        there += [
            {"series": metric.replace('SessionName="s"', f'SessionName="{name}"'), "values": values}
            for metric, values in {**HEALTHY, **case.differs}.items()
            if values is not None
        ]
        cluster = f', SessionName="{name}"' if there else ""
        told += [
            {"labels": f'{{alertname="Headrace{fires}"{cluster}}}', "value": 1}
            for fires in case.fires
        ]
    query = 'count by (alertname, SessionName) (ALERTS{alertstate="firing"})'
    tests = [{"expr": query, "eval_time": f"{END}m", "exp_samples": told}]
    return {"interval": "1m", "input_series": there, "promql_expr_test": tests}


def test_alerts_fire_on_their_fault_and_not_otherwise(tmp_path: Path) -> None:
    """Many clusters of one Prometheus: each has its own fault, and only its own alerts."""
    rules = tmp_path / "rules.yaml"
    rules.write_text(re.sub(r"interval: \S+", "interval: 1m", RULES.read_text()))
    file = tmp_path / "tests.yaml"
    empty = "nothing is scraped"
    document = {
        "rule_files": [str(rules)],
        "evaluation_interval": "1m",
        "tests": [a_group([empty]), a_group([name for name in CASES if name != empty])],
    }
    file.write_text(yaml.safe_dump(document))
    promtool("test", "rules", str(file))


def test_promtool_accepts_the_rules() -> None:
    promtool("check", "rules", str(RULES))


@pytest.mark.parametrize("alert", alerts(), ids=lambda alert: alert.name)
def test_every_alert_has_an_entry_in_the_runbook(alert: object) -> None:
    rule = alert.rule()  # type: ignore[attr-defined]
    page = (ROOT / RUNBOOK).read_text()
    path, anchor = rule["annotations"]["runbook_url"].split("#")
    assert path == RUNBOOK and anchor == rule["alert"].lower()
    entry = re.search(rf"^### {rule['alert']}$(.*?)(?=^##|\Z)", page, re.M | re.S)
    assert entry is not None, f"{RUNBOOK} has no entry ### {rule['alert']}"
    for part in ("**Means.**", "**Users**", "**Look.**", "**Do.**"):
        assert part in entry[1], f"{rule['alert']} lacks {part}"
