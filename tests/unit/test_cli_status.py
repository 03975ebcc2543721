"""`headrace status`: health first, nothing cut at 80 columns, details only when asked."""

from __future__ import annotations

import io
from copy import deepcopy
from typing import Any

from rich.console import Console

from headrace.cli.show.status import document, render
from headrace.cli.state import Instance

PREFILL = {
    "role": "prefill",
    "deployment": "prefill",
    "replica_id": "abcdefgh123",
    "prompt_tokens_computed": 1234567,
    "nixl": {"bytes": 0, "failures": 0},
    "running": 0,
    "waiting": 0,
    "kv_usage": 0.0,
    "steps": 1200,
}
DECODE = {
    "role": "decode",
    "deployment": "decode",
    "replica_id": "zyxwvuts987",
    "prompt_tokens_computed": 10,
    "nixl": {"bytes": 3 * 2**20, "failures": 1},
    "running": 2,
    "waiting": 1,
    "kv_usage": 0.25,
    "steps": 1300,
    "router": {
        "fits": {"decode_step": {"base_s": 0.0218, "samples": 40}},
        "outcomes": {
            "requests": 761,
            "prompt_tokens": 1000,
            "reachable_tokens": 300,
            "reached_tokens": 250,
        },
        "prefill": {"abcdefgh123": {"breaker": {"state": "closed"}}},
    },
}
QUEUE = {
    "waiting": 0,
    "background_waiting": 0,
    "tenants_waiting": 0,
    "predicted_wait_s": 0.0,
    "admitted": 1200,
    "waited": 0,
    "refused": 0,
    "expired": 0,
}
DRAM = {"state": "on", "blocks": 7, "bytes": 2**20, "size_bytes": 2**30, "hits": 5, "misses": 3}
STATUS: dict[str, Any] = {
    "health": {"state": "ok", "problems": [], "answering": 2, "expected": 2},
    "replicas": [PREFILL, DECODE],
    "plans": {"local": 7, "remote": 3},
    "nixl_bytes": 3 * 2**20,
    "store": [{"machine": "0123456789", "tiers": {"dram": DRAM}}],
    "gateway": {
        "router": {"plans": {}, "replicas": 0, "oldest_report_s": 0.0, "unhealthy": {}},
        "queue": QUEUE,
    },
}
HISTORY = {
    "last": {
        "seconds": 60,
        "requests_per_s": 0.4,
        "tokens_per_s": 12.3,
        "error_rate": 0.0,
        "ttft_p50_s": 0.41,
    }
}
INSTANCE = Instance("default", "t", endpoint="http://127.0.0.1:8000", model="smollm2")


def shown(
    data: dict[str, Any] = STATUS,
    instance: Instance = INSTANCE,
    history: dict[str, Any] | None = HISTORY,
    verbose: bool = False,
) -> str:
    out = io.StringIO()
    render(instance, data, Console(file=out, width=80), history=history, verbose=verbose)
    return out.getvalue()


def changed(**parts: Any) -> dict[str, Any]:
    return deepcopy(STATUS) | parts


def test_the_first_line_is_the_health_with_rates_and_times() -> None:
    assert shown().splitlines()[0] == (
        "OK: 2 of 2 replicas answer, 0.4 requests/s, TTFT p50 410 ms, 12.3 tokens/s"
    )


def test_an_idle_app_is_ok() -> None:
    idle = {"last": {"requests_per_s": 0.0, "error_rate": None}}
    line = "OK: 2 of 2 replicas answer, no request in the last minute"
    assert shown(history=idle).splitlines()[0] == line


def test_an_app_without_a_history_shows_its_replicas_only() -> None:
    assert shown(history=None).splitlines()[0] == "OK: 2 of 2 replicas answer"


def test_a_broken_app_names_its_problems_and_then_the_count() -> None:
    problems = ["decode deadbeef is down", "the status lacks advice: KeyError: 'x'"]
    health = {"state": "degraded", "problems": problems, "answering": 2, "expected": 3}
    assert shown(changed(health=health)).splitlines()[:2] == [
        "degraded: decode deadbeef is down; the status lacks advice: KeyError: 'x'; 2 of ",
        "3 replicas answer",
    ]


def test_a_replica_that_is_down_is_marked_in_the_table() -> None:
    data = changed()
    data["replicas"].append({**DECODE, "replica_id": "deadbeef000"})
    data["gateway"]["router"]["unhealthy"] = {"deadbeef000": "down"}
    assert "decode/deadbeef   down " in shown(data)


def test_what_engines_run_without_is_told_once_with_the_reason() -> None:
    why = {"left_out": {"store": "the model has recurrent layers"}}
    data = changed(replicas=[PREFILL | why, DECODE | why])
    told = "no store at prefill/abcdefgh, decode/zyxwvuts: the model has recurrent layers"
    assert told in " ".join(shown(data).split())
    assert "no store" not in shown()


def test_replicas_and_tiers_fit_80_columns_with_whole_names() -> None:
    lines = shown().splitlines()
    assert all(len(line.rstrip()) <= 80 for line in lines)
    assert "decode/zyxwvuts         2        1    25.0%                      10" in lines
    assert "dram  on          7  1.0 MiB of 1.0 GiB     5       3" in lines


def test_addresses_and_paths_are_one_line_each_however_long() -> None:
    instance = Instance(
        "a", "t", temp_dir="/tmp/" + "a" * 90, dashboard_url="http://127.0.0.1:11856"
    )
    text = shown(instance=instance)
    assert "Ray's dashboard: http://127.0.0.1:11856\n" in text
    assert f"  its token: /tmp/{'a' * 90}/ray-token\n" in text


def test_what_says_nothing_is_hidden() -> None:
    """With one decode replica, the replica plans for itself, and an idle queue is no news."""
    text = shown()
    assert "placed by this gateway" not in text and "queue of this gateway" not in text


def test_a_queue_and_a_placement_that_say_something_are_shown() -> None:
    plans = {"local": 5, "prompt_tokens": 1000, "held_tokens": 250}
    router = {"plans": plans, "replicas": 2, "oldest_report_s": 0.21}
    queue = {**QUEUE, "waiting": 3, "tenants_waiting": 2, "refused": 7}
    text = " ".join(shown(changed(gateway={"router": router, "queue": queue})).split())
    assert "placed by this gateway: 5 local, 0 remote; 25% of their prompt tokens" in text
    assert "queue of this gateway: 3 wait, of 2 tenants" in text and "7 refused" in text


def test_unfinished_batches_are_shown_with_their_progress() -> None:
    progress = {"status": "in_progress", "total": 1000, "completed": 400, "failed": 3}
    batch = {"id": "batch_" + "a" * 40, "tenant": "ann", "in_flight": 8, **progress}
    text = " ".join(shown(changed(gateway={"batches": [batch]})).split())
    assert "batch batch_aaaaaaaa of ann: in_progress, 403 of 1,000 lines done, 3 failed" in text
    assert "lines done" not in shown()


def test_several_models_are_named_and_each_has_its_queue() -> None:
    router = {"unhealthy": {DECODE["replica_id"]: "suspect"}}
    models = {
        "small": {"router": router, "queue": {**QUEUE, "waiting": 3, "refused": 7}},
        "large": {"queue": {**QUEUE, "waiting": 0, "waited": 0, "refused": 0, "expired": 0}},
    }
    text = " ".join(shown(changed(gateway={"models": models})).split())
    assert "small, large at http://127.0.0.1:8000/v1" in text and "suspect" in text
    assert "queue of this gateway for small: 3 wait" in text
    assert "queue of this gateway for large" not in text


def test_details_are_shown_when_asked() -> None:
    hidden = ("1,300", "3.0 MiB, 1 failed", "base_s 0.0218", "moved over NIXL")
    assert [part for part in hidden if part in shown()] == []
    text = shown(verbose=True)
    assert [part for part in hidden if part not in text] == []


def test_a_tier_that_is_off_is_a_line_and_counts_nothing() -> None:
    tiers = {"dram": DRAM, "nvme": {"state": "off", "reason": "no nvme_folder", "misses": 544}}
    text = shown(changed(store=[{"machine": "m", "tiers": tiers}]))
    assert "tier nvme is off: no nvme_folder" in text and "544" not in text


def test_machines_are_named_if_there_are_several() -> None:
    nodes = [{"machine": name * 8, "tiers": {"dram": DRAM}} for name in "ab"]
    text = shown(changed(store=nodes))
    assert "aaaaaaaa  dram" in text and "bbbbbbbb  dram" in text


def test_json_is_the_status_with_the_health_and_the_last_minute() -> None:
    found = document(STATUS, HISTORY)
    assert found["health"]["state"] == "ok" and found["last_minute"] == HISTORY["last"]
    assert found["replicas"] == STATUS["replicas"]
    assert document({"models": []}, None)["health"] is None
