"""What became of KV blocks, as vLLM's statistics carry it."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import prometheus_client

from headrace_engine.connector.stats import COUNTER, Reporter, StorePromMetrics, StoreStats


def test_a_report_holds_what_is_new() -> None:
    counts = Counter(saved=2)
    reporter = Reporter()
    first = reporter.report(counts)
    assert first is not None and first.data == {"saved": 2}
    assert reporter.report(counts) is None
    counts.update(saved=1, lost_gone=4)
    second = reporter.report(counts)
    assert second is not None and second.data == {"saved": 1, "lost_gone": 4}


def test_a_count_of_nothing_is_no_news() -> None:
    assert Reporter().report(Counter(saved=0)) is None


def test_reports_of_both_sides_and_of_all_workers_add_up() -> None:
    total = StoreStats({"saved": 1}).aggregate(StoreStats({"saved": 2, "declined_nvme": 3}))
    assert total.reduce() == {"declined_nvme": 3, "saved": 3}
    total.reset()
    assert total.is_empty()


def test_prometheus_counts_blocks_by_event() -> None:
    registry = prometheus_client.CollectorRegistry()

    def counter(**given: Any) -> prometheus_client.Counter:
        return prometheus_client.Counter(**given, registry=registry)

    config: Any = SimpleNamespace(kv_transfer_config=None)
    types: Any = {
        prometheus_client.Counter: counter,
        prometheus_client.Gauge: None,
        prometheus_client.Histogram: None,
    }
    metrics = StorePromMetrics(config, types, ["engine"], {0: ["0"]})
    metrics.observe({"saved": 2})
    metrics.observe({"saved": 1, "lost_gone": 1})
    value = registry.get_sample_value(COUNTER + "_total", {"engine": "0", "event": "saved"})
    assert value == 3
