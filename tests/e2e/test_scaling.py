"""Two decode and two prefill replicas of a tiny model under 20 streams: replicas come and go, and
no stream is lost; Serve's autoscaling follows the load that comes over the gateway's port.

The tests run in order, each from where the one before left the app.
"""

from __future__ import annotations

import httpx
import pytest

from tests.support.app import until
from tests.support.load import Answer, Load
from tests.support.served import MODEL, ServedApp

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1200)]

STREAMS = 20
START_S = 400
"""For a replica that starts beside 20 streams and whatever else tests run on two cores."""
TOKENS = 200
SCALING = {
    "min_replicas": 1,
    "max_replicas": 2,
    "target_ongoing_requests": 5,
    "upscale_delay_s": 1.0,
    "downscale_delay_s": 4.0,
    "metrics_interval_s": 1.0,
    "look_back_period_s": 2.0,
}
PROMPTS = [[(7 * n + i) % 1500 + 300 for i in range(100 + 60 * n)] for n in range(8)]


def streams(served: ServedApp) -> Load:
    return Load(served.url, PROMPTS, clients=STREAMS, max_tokens=TOKENS, model=MODEL)


def assert_none_lost(answers: list[Answer]) -> None:
    lost = [answer for answer in answers if not answer.whole or len(answer.tokens) != TOKENS]
    assert not lost, f"{len(lost)} of {len(answers)} streams: {lost[:3]}"


def ready(served: ServedApp) -> int:
    return int(httpx.get(f"{served.url}/health").json()["replicas_ready"])


def test_scaling_by_hand_and_by_load_loses_no_stream(served: ServedApp) -> None:
    with streams(served) as load:

        def there() -> str:
            return f"{served.status()} {load}{served.logs()}"

        until(lambda: len(load.answers) >= STREAMS, 120, "streams run", there)
        served.deploy({"decode": {"max_ongoing_requests": 50, "num_replicas": 1}})
        until(lambda: ready(served) == 1, 20, "one replica is asked", there)
        until(lambda: served.count("decode", "STOPPING") == 0, 90, "it has gone", there)
        until(lambda: served.count("decode") == 1, 30, "the other one runs", there)
        served.deploy({"decode": {"num_replicas": None, "autoscaling_config": SCALING}})
        until(lambda: ready(served) == 2, START_S, "a second one under load", there)
        answered = len(load.answers)
        until(lambda: len(load.answers) >= answered + STREAMS, 120, "streams go on", there)
    assert_none_lost(load.stop())
    until(lambda: served.count("decode") == 1, 60, "one again after it", served.status)


def test_a_redeploy_loses_no_stream_and_keeps_the_orders(served: ServedApp) -> None:
    order = httpx.put(f"{served.url}/headrace/v1/router", json={"policy": "remote"})
    assert order.json() == {"policy": "remote", "replicas": 1}
    served.args["headrace"]["router"] = {"remeasure_s": 90}
    for role in ("prefill_config", "decode_config"):
        served.args[role]["deployment_config"]["num_replicas"] = 1
    with streams(served) as load:
        until(lambda: len(load.answers) >= STREAMS, 60, "streams run")
        before = {each["replica_id"] for each in replicas(served)}
        served.deploy(fresh=True)
        until(lambda: served.status()["status"] == "DEPLOYING", 30, "the redeploy begins")
        served.wait_running(START_S)
        until(lambda: replicas(served) != [], 20, "replicas answer")
        until(
            lambda: not before & {each["replica_id"] for each in replicas(served)},
            90,
            "the old replicas have gone",
        )
        answered = len(load.answers)
        until(lambda: len(load.answers) >= answered + STREAMS, 120, "streams go on")
    assert_none_lost(load.stop())
    policies = [each["router"]["policy"] for each in replicas(served) if each["role"] == "decode"]
    assert policies and set(policies) == {"remote"}


def replicas(served: ServedApp) -> list[dict[str, object]]:
    status = httpx.get(f"{served.url}/headrace/v1/status", timeout=20).json()
    return list(status["replicas"])
