"""What whoever runs Headrace can see: ids, plans, status, metrics, logs, processes."""

from __future__ import annotations

import json
import re
import uuid
from concurrent.futures import ThreadPoolExecutor

import pytest

from headrace.disaggregation import MIN_REQUESTS
from tests.support.app import DRAFT_TOKENS, MODEL, App, until
from tests.support.prompts import noise
from tests.support.promql import DCGM, MADE_HERE, Asked, asked, exported

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("same_replicas")]


def test_the_clients_request_id_comes_back(app: App) -> None:
    name = f"mine-{uuid.uuid4().hex}"
    for path, prompt in (
        ("/v1/completions", {"prompt": "Hello"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello"}]}),
    ):
        answer = app.client.post(
            path, json={"model": MODEL, "max_tokens": 1, **prompt}, headers={"X-Request-Id": name}
        )
        assert answer.headers["x-request-id"] == name
        assert name in answer.json()["id"]


def test_a_request_without_an_id_is_given_one(app: App) -> None:
    answer = app.client.get("/v1/models")
    assert re.fullmatch(r"[0-9a-f]{32}", answer.headers["x-request-id"])


@pytest.mark.parametrize("way", ["local", "remote"])
@pytest.mark.parametrize("chat", [False, True])
def test_a_plan_is_found_under_the_clients_id(app: App, way: str, chat: bool) -> None:
    name = f"plan-{uuid.uuid4().hex}"
    path = "/v1/chat/completions" if chat else "/v1/completions"
    prompt = {"messages": [{"role": "user", "content": "Hi"}]} if chat else {"prompt": "Hi there"}
    body = {"model": MODEL, "max_tokens": 2, "cache_salt": name, **prompt}
    with app.policy(way):
        answer = app.client.post(path, json=body, headers={"X-Request-Id": name})
    assert answer.status_code == 200
    plan = app.plan(name)
    assert plan["kind"] == way
    assert plan["prompt_tokens"] == answer.json()["usage"]["prompt_tokens"]
    assert plan["reasons"]
    assert name in plan["request_id"]


@pytest.mark.parametrize("way", ["local", "remote"])
def test_a_plan_says_in_hindsight_what_it_reached(app: App, way: str) -> None:
    name = f"seen-{uuid.uuid4().hex}"
    prompt = noise(400, 6)
    with app.policy(way):
        for turn in range(2):
            app.complete(prompt, cache_salt=name, headers={"X-Request-Id": f"{name}-{turn}"})
    first, again = app.plan(f"{name}-0"), app.plan(f"{name}-1")
    assert first["reachable_tokens"] == first["measured"]["cached_tokens"] == 0
    assert 0 < again["measured"]["cached_tokens"] <= again["reachable_tokens"]
    came = again["measured"]
    assert came["ttft_s"] > 0


def test_the_status_sums_up_hits_and_advises_on_roles(app: App) -> None:
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: app.complete("Hello", max_tokens=4), range(MIN_REQUESTS)))
    status = app.status()
    told = app.replica("decode")["router"]["outcomes"]
    assert told["requests"] >= MIN_REQUESTS
    assert 0 < told["reached_tokens"] <= told["prompt_tokens"]
    advice = status["advice"]
    assert (advice["now"]["prefill"], advice["now"]["decode"]) == (1, 1)
    assert advice["best"]["ttft_s"] > 0 and advice["prefill"] >= 1 and advice["decode"] >= 1


def test_a_request_that_must_stay_says_why(app: App) -> None:
    name = f"n-{uuid.uuid4().hex}"
    with app.policy("remote"):
        app.complete("Hello", n=2, temperature=1, headers={"X-Request-Id": name})
    plan = app.plan(name)
    assert plan["kind"] == "local"
    assert "n > 1" in " ".join(plan["reasons"])


def test_an_unknown_plan_is_not_found(app: App) -> None:
    answer = app.client.get("/headrace/v1/plans/nobody-asked-this")
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "plan_not_found"


def test_the_status_tells_roles_load_and_models(app: App) -> None:
    status = app.status()
    assert {r["role"] for r in status["replicas"]} == {"prefill", "decode"}
    for replica in status["replicas"]:
        assert replica["deployment"] == replica["role"]
        assert replica["model"] == MODEL
        assert replica["pid"] > 0
        assert 0 <= replica["kv_usage"] <= 1
        assert replica["steps"] > 0
    router = app.replica("decode")["router"]
    assert router["policy"] == "cost"
    assert set(router["plans"]) >= {"local", "remote"}
    for model in ("decode_step", "prefill_step", "transfer", "call"):
        assert router["fits"][model], f"nothing fitted for {model}"
    assert router["breaker"]["state"] == "closed"


def test_the_running_requests_show_in_the_status(app: App) -> None:
    body = {
        "model": MODEL,
        "prompt": noise(20, 5),
        "max_tokens": 2000,  # more than anybody waits for
        "ignore_eos": True,
        "stream": True,
    }
    with app.client.stream("POST", "/v1/completions", json=body) as stream:
        assert stream.status_code == 200, stream.read()
        next(stream.iter_bytes())

        def shown() -> bool:
            decode = app.replica("decode")
            return bool(decode["running"] >= 1 and decode["kv_usage"] > 0)

        until(shown, 60, "a running request, and its KV", app.status)
    app.wait_idle()


def test_a_short_prompt_is_answered_while_a_long_one_is_computed(app: App) -> None:
    """A prompt alone gets whole steps, so it must take several for another to come between."""
    with app.policy("local"), ThreadPoolExecutor(1) as pool:
        long = pool.submit(app.complete, noise(3000, 81), max_tokens=1, cache_salt="long")
        until(lambda: app.replica("decode")["running"] == 1, 10, "it is computed", every_s=0.05)
        app.complete(noise(20, 82), max_tokens=1)
        assert not long.done()
        assert long.result()["usage"]["prompt_tokens"] == 3000
    app.wait_idle()


def test_metrics_have_one_prefix_each(app: App) -> None:
    app.complete("Hello", max_tokens=1)

    def names() -> set[str]:
        answer = app.client.get("/metrics")
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/plain")
        lines = [line for line in answer.text.splitlines() if line and not line.startswith("#")]
        return {re.split(r"[{ ]", line)[0] for line in lines}

    counted = {"ray_headrace_gateway_requests_total", "ray_headrace_plans_total"}
    wanted = {"ray_headrace_", "ray_vllm_", "ray_serve_"}
    until(
        lambda: counted <= names() and {n[: n.index("_", 4) + 1] for n in names()} == wanted,
        30,
        "metrics of Headrace, vLLM and Serve, and no others",
        lambda: sorted(names())[:40],
        every_s=1.0,
    )


EVENTFUL = {
    "ray_headrace_gateway_replica_losses_total": "a replica dies under a request",
    "ray_headrace_remote_prefill_failures_total": "a remote prefill is given up",
    "ALERTS": "Prometheus evaluates the rules",
    "ray_headrace_gateway_tenant_requests_total": "API keys are configured",
    "ray_headrace_gateway_tenant_tokens_total": "API keys are configured",
    "ray_headrace_gateway_queue_seconds_bucket": "`gateway.admission` is configured",
    "ray_headrace_gateway_queue_length": "`gateway.admission` is configured",
    "ray_headrace_gateway_predicted_wait_seconds": "`gateway.admission` is configured",
    "ray_serve_autoscaling_desired_replicas": "`autoscaling` is configured",
    "ray_headrace_plans_replaced_total": "a gateway's plan is stale; takes two decode replicas",
    "ray_headrace_kv_lookup_failures_total": "the store node does not answer a planner",
    "ray_headrace_speculation_failures_total": "the drafter fails",
    "ray_vllm_nixl_num_failed_transfers_total": "a transfer fails",
    "ray_vllm_nixl_num_failed_notifications_total": "a notification fails",
    "ray_vllm_nixl_num_kv_expired_reqs_total": "nobody fetches a prompt's KV",
}
"""Metrics that a healthy app does not export, and what makes them appear. That the code makes them,
with their labels, is `tests/unit/test_dashboards.py`'s matter."""
GPUS = ("ray_node_", DCGM)
"""Beginnings of metrics that a machine without GPUs does not export."""
RARE = {("status", "429"), ("when", "stream"), ("event", "unproved_content")}
"""Label values of the same kind."""


def test_every_metric_of_dashboards_and_alerts_is_exported(app: App) -> None:
    salt = uuid.uuid4().hex
    with app.drafting(f"static:{DRAFT_TOKENS}"):
        for way in ("local", "remote"):
            with app.policy(way):
                for turn in range(2):
                    body = {"cache_salt": f"{salt}-{way}", "max_tokens": 24, "ignore_eos": True}
                    body |= {"model": MODEL, "prompt": noise(300, 8), "stream": True}
                    body |= {"temperature": 0}
                    answer = app.client.post("/v1/completions", json=body)
                    assert answer.status_code == 200, (turn, answer.text)
    assert app.client.get("/v1/nothing-is-here").status_code == 404
    missing: list[str] = []

    def all_there() -> bool:
        there = exported(app.client.get("/metrics").text)
        missing[:] = [one for each in asked() if (one := lack(each, there))]
        return not missing

    until(all_there, 60, "every metric and label", lambda: sorted(set(missing)), every_s=2.0)


def lack(one: Asked, there: dict[str, list[dict[str, str]]]) -> str:
    """What is not exported of a series that a query asks for."""
    if one.metric in EVENTFUL or one.metric.startswith(GPUS):
        return ""
    found = there.get(one.metric)
    if not found:
        return f"{one.where}: {one.metric}"
    names = set().union(*found) | MADE_HERE
    wrong = [name for name in {m[0] for m in one.matchers} | one.labels if name not in names]
    for name, operator, value in one.matchers:
        values = {labels.get(name) for labels in found}
        if operator == "MatchOp.Equal" and (name, value) not in RARE:
            wrong += [f"{name}={value}"] if value not in values else []
    return f"{one.where}: {one.metric}: {wrong}" if wrong else ""


def test_logs_carry_the_request_id_in_each_role(app: App) -> None:
    name = f"logged-{uuid.uuid4().hex}"
    with app.policy("remote"):
        app.complete(noise(64, 77), headers={"X-Request-Id": name}, cache_salt=name)

    def roles() -> set[str]:
        found = set()
        for file in app.folder.glob("*/r/session_2*/logs/**/*"):
            if not file.is_file() or file.suffix not in (".log", ".err", ".out"):
                continue
            for line in file.read_text("utf-8", errors="replace").splitlines():
                if name in line and line.lstrip().startswith("{"):
                    entry = json.loads(line)
                    if name in str(entry.get("request_id")):
                        found.add(str(entry["role"]))
        return found

    until(
        lambda: roles() >= {"gateway", "decode", "prefill"},
        15,
        "the id in the logs of gateway, decode and prefill",
        roles,
        every_s=1.0,
    )


def test_spans_of_all_roles_hang_together_under_the_clients(app: App) -> None:
    collector = app.collector
    if collector is None:
        pytest.skip("an app of somebody else's sends its spans elsewhere")
    trace, parent = uuid.uuid4().hex, uuid.uuid4().hex[:16]
    with app.policy("remote"):
        headers = {"traceparent": f"00-{trace}-{parent}-01"}
        app.complete(noise(64, 78), headers=headers, cache_salt=trace)
    services = {"headrace-gateway", "headrace-decode", "headrace-prefill"}

    def lacking() -> list[object]:
        """What the processes have not sent yet: each sends its spans in batches of its own."""
        spans = [span for span in collector.of_trace(trace) if span.service in services]
        known = {span.span for span in spans} | {parent}
        adrift = [span for span in spans if span.parent not in known]
        plans = {("headrace-decode", "plan")} - {(span.service, span.name) for span in spans}
        return [*services - {span.service for span in spans}, *plans, *adrift]

    until(lambda: not lacking(), 30, "spans of all roles, each under another", lacking, every_s=1.0)
    spans = collector.of_trace(trace)
    [first] = [span for span in spans if span.service == "headrace-gateway"]
    assert first.parent == parent


def test_health_and_documents(app: App) -> None:
    assert app.get("/health")["status"] == "ok"
    assert app.get("/version")["version"]
    assert MODEL in str(app.get("/"))
    assert app.get("/openapi.json")["openapi"].startswith("3.")


def test_a_wrong_policy_is_refused(app: App) -> None:
    for body in ({"policy": "psychic"}, {"policy": 1}, {}, []):
        answer = app.client.put("/headrace/v1/router", json=body)
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["message"]
    assert app.replica("decode")["router"]["policy"] == "cost"
