"""Two gateways, two decode and two prefill replicas of a tiny model under 20 streams: each of them
may go, and no stream but those of a gateway that is killed is lost; Serve's autoscaling follows the
load that comes over the gateways' port, from nothing and to nothing.

One app for the file; its tests run in order, each from where the one before left it.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Semaphore
from typing import Any

import httpx
import psutil
import pytest

from tests.support.app import until
from tests.support.load import Answer, Load, ask
from tests.support.served import MODEL, ServedApp, free_port, tiny_args

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(420)]

STREAMS = 20
TOKENS = 200
MANY_TOKENS = 1200
"""Seconds, where a few streams are alone."""
WAIT_S = 240.0
SCALING = {
    "min_replicas": 2,
    "max_replicas": 2,
    "target_ongoing_requests": 5,
    "upscale_delay_s": 1.0,
    "downscale_delay_s": 4.0,
    "metrics_interval_s": 1.0,
    "look_back_period_s": 2.0,
}
"""Of the decode replicas."""
PROMPTS = [[(7 * n + i) % 1500 + 300 for i in range(100 + 60 * n)] for n in range(8)]


@pytest.fixture(scope="module")
def served() -> Iterator[ServedApp]:
    args = tiny_args(free_port())
    args["decode_config"]["deployment_config"] |= {
        "num_replicas": None,
        "autoscaling_config": SCALING,
    }
    # A redeploy must not wait for its own load to end.
    args["headrace"]["drain_s"] = 60
    args["headrace"]["gateway"] |= {"replicas": 2, "queue_timeout_s": WAIT_S}
    with ServedApp(args) as app:
        yield app


def streams(served: ServedApp) -> Load:
    return Load(served.url, PROMPTS, clients=STREAMS, max_tokens=TOKENS, model=MODEL)


def assert_none_lost(answers: list[Answer], tokens: int = TOKENS) -> None:
    lost = [answer for answer in answers if not is_whole(answer, tokens)]
    assert not lost, f"{len(lost)} of {len(answers)} streams: {lost[:3]}"


def is_whole(answer: Answer, tokens: int = TOKENS) -> bool:
    return answer.whole and len(answer.tokens) == tokens


def ready(served: ServedApp) -> int:
    return int(httpx.get(f"{served.url}/health").json()["replicas_ready"])


def status(served: ServedApp, client: Any = httpx) -> dict[str, Any]:
    return dict(client.get(f"{served.url}/headrace/v1/status", timeout=20).json())


def replicas(served: ServedApp) -> list[dict[str, Any]]:
    return list(status(served)["replicas"])


def scale(served: ServedApp, **scaling: float) -> None:
    """Change the bounds of autoscaling, and an option besides."""
    config = {**SCALING, **scaling}
    served.deploy({"decode": {"max_ongoing_requests": 50, "autoscaling_config": config}})


@contextlib.contextmanager
def connections(served: ServedApp, of_each: int) -> Iterator[dict[int, list[httpx.Client]]]:
    """So many clients of each of the two gateways by its process; each has one connection."""
    with contextlib.ExitStack() as stack:
        found: dict[int, list[httpx.Client]] = {}
        for _ in range(50):
            client = stack.enter_context(httpx.Client(limits=httpx.Limits(max_connections=1)))
            clients = found.setdefault(status(served, client)["gateway"]["pid"], [])
            if len(clients) < of_each:
                clients.append(client)
            if [len(each) for each in found.values()] == [of_each, of_each]:
                break
        else:
            raise AssertionError(f"one of two gateways gets no connection: {found.keys()}")
        yield found


def listeners(served: ServedApp) -> int:
    """How many sockets take connections at the gateways' port."""
    port = httpx.URL(served.url).port
    sockets = psutil.net_connections("tcp")
    return sum(each.status == psutil.CONN_LISTEN and each.laddr.port == port for each in sockets)


def test_a_gateway_that_is_killed_breaks_no_stream_of_the_other(served: ServedApp) -> None:
    each, began = 3, Semaphore(0)
    with connections(served, each) as clients, ThreadPoolExecutor(2 * each) as pool:
        killed, other = clients
        running = {
            pid: [
                pool.submit(
                    *(ask, served.url, PROMPTS, n, MANY_TOKENS, WAIT_S, MODEL),
                    client=client,
                    began=began.release,
                )
                for n, client in enumerate(clients[pid])
            ]
            for pid in clients
        }
        for _ in range(2 * each):
            assert began.acquire(timeout=60)
        os.kill(killed, signal.SIGKILL)
        # Until the kernel has closed its socket, some new connections are still its own.
        until(lambda: listeners(served) == 1, 10, "one gateway listens", every_s=0.05)
        assert_none_lost([ask(served.url, PROMPTS, 0, TOKENS, WAIT_S, MODEL)])
        broken, whole = ([stream.result() for stream in running[pid]] for pid in (killed, other))
        assert not any(answer.whole for answer in broken), "killed too late"
        assert_none_lost(whole, MANY_TOKENS)
    until(lambda: served.count("gateway") == 2, 60, "two gateways again", served.status)


def test_scaling_by_hand_and_by_load_loses_no_stream(served: ServedApp) -> None:
    with streams(served) as load:
        until(lambda: len(load.answers) >= STREAMS, 120, "streams run")
        scale(served, min_replicas=1, max_replicas=1)
        until(lambda: ready(served) == 1, 20, "one replica is asked", served.status)
        until(lambda: served.count("decode", "STOPPING") == 0, 90, "it has gone", served.status)
        until(lambda: served.count("decode") == 1, 30, "the other one runs", served.status)
        served.engines_give_way()
        scale(served, min_replicas=1)
        until(lambda: ready(served) == 2, 150, "a second one under load", served.status)
        answered = len(load.answers)
        until(lambda: len(load.answers) >= answered + STREAMS, 60, "streams go on")
    assert_none_lost(load.stop())


def test_a_redeploy_loses_no_stream_and_keeps_the_orders(served: ServedApp) -> None:
    order = httpx.put(f"{served.url}/headrace/v1/router", json={"policy": "remote"})
    assert order.json() == {"policy": "remote", "replicas": 2}
    served.args["headrace"]["router"] = {"stall_weight": 1.5}
    served.args["prefill_config"]["deployment_config"]["num_replicas"] = 1
    served.args["decode_config"]["deployment_config"]["autoscaling_config"] = {
        **SCALING,
        "min_replicas": 1,
        "max_replicas": 1,
    }
    with streams(served) as load:
        until(lambda: len(load.answers) >= STREAMS, 60, "streams run")
        before = {each["replica_id"] for each in replicas(served)}
        served.engines_give_way()
        served.deploy(fresh=True)
        until(lambda: served.status()["status"] == "DEPLOYING", 30, "the redeploy begins")
        served.wait_running(WAIT_S)
        until(lambda: replicas(served) != [], 20, "replicas answer")
        until(
            lambda: not before & {each["replica_id"] for each in replicas(served)},
            90,
            "the old replicas have gone",
        )
        answered = len(load.answers)
        until(lambda: len(load.answers) >= answered + STREAMS, 60, "streams go on")
    assert_none_lost(load.stop())
    policies = [each["router"]["policy"] for each in replicas(served) if each["role"] == "decode"]
    assert policies and set(policies) == {"remote"}


def test_without_load_no_replica_runs_and_the_first_request_starts_one(served: ServedApp) -> None:
    scale(served, min_replicas=0)
    until(lambda: served.count("decode") == 0, 60, "no decode replica", served.status)
    until(lambda: httpx.get(f"{served.url}/health").status_code == 503, 10, "nobody is ready")
    assert_none_lost([ask(served.url, PROMPTS, 0, TOKENS, WAIT_S, MODEL)])
    assert ready(served) == 1
