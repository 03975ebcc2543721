"""Two decode and two prefill replicas of a tiny model under 20 streams: replicas come and go, and
no stream is lost; Serve's autoscaling follows the load that comes over the gateway's port.

The tests run in order, each from where the one before left the app. While a replica starts, which
takes all that the cores can give, the streams are fewer.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.support.app import until
from tests.support.load import Answer, Load, separate_connections
from tests.support.served import MODEL, ServedApp

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1200)]

STREAMS = 20
START_S = 400
"""For a replica that starts beside 20 streams and whatever else tests run on two cores."""
NEVER_S = 3600.0
PAUSE_S = 40.0
"""Between two streams of a client while a replica starts."""
TOKENS = 120
SCALING = {
    "min_replicas": 1,
    "max_replicas": 2,
    "target_ongoing_requests": 5,
    "metrics_interval_s": 1.0,
    "look_back_period_s": 2.0,
}
PROMPTS = [[(7 * n + i) % 1500 + 300 for i in range(100 + 60 * n)] for n in range(8)]


@pytest.fixture
def client(served: ServedApp) -> Iterator[httpx.Client]:
    """An operator's."""
    shown = served.bearer("operator")
    with separate_connections(served.url, 20, shown) as client:
        yield client


def streams(served: ServedApp) -> Load:
    """Each shows a key, whether or not the app asks for one."""
    return Load(
        served.url,
        PROMPTS,
        clients=STREAMS,
        max_tokens=TOKENS,
        model=MODEL,
        headers=served.bearer("shop"),
    )


def assert_none_lost(answers: list[Answer]) -> None:
    lost = [answer for answer in answers if not answer.whole or len(answer.tokens) != TOKENS]
    assert not lost, f"{len(lost)} of {len(answers)} streams: {lost[:3]}"


def ready(client: httpx.Client) -> int:
    return int(client.get("/health").json()["replicas_ready"])


def autoscaled(*, upscale_delay_s: float, downscale_delay_s: float) -> dict[str, Any]:
    scaling = {
        **SCALING,
        "upscale_delay_s": upscale_delay_s,
        "downscale_delay_s": downscale_delay_s,
    }
    return {"decode": {"num_replicas": None, "autoscaling_config": scaling}}


def test_engines_that_serve_keep_the_file_of_the_readiness_probe(served: ServedApp) -> None:
    def age_s() -> float:
        return time.time() - served.ready_file.stat().st_mtime

    until(served.ready_file.exists, 60, "an engine has touched it", served.logs)
    until(lambda: age_s() < 10, 60, "an engine touches it again", served.logs)


def test_a_killed_controller_takes_no_replica_with_it(
    served: ServedApp, client: httpx.Client
) -> None:
    before = {each["replica_id"] for each in replicas(client)}
    killed = served.controller()
    assert killed is not None
    with streams(served) as load:
        until(lambda: len(load.answers) >= STREAMS, 120, "streams run")
        killed.kill()
        until(lambda: served.controller() not in (None, killed), 120, "there is another one")
        for role in ("prefill", "decode"):
            until(lambda role=role: served.count(role) == 2, 120, f"it has found {role} again")  # type: ignore[misc]
    assert_none_lost(load.stop())
    assert {each["replica_id"] for each in replicas(client)} == before


def test_scaling_by_hand_loses_no_stream(served: ServedApp, client: httpx.Client) -> None:
    with streams(served) as load:

        def there() -> str:
            return f"{served.status()} {load}{served.logs()}"

        until(lambda: len(load.answers) >= STREAMS, 120, "streams run", there)
        served.deploy({"decode": {"max_ongoing_requests": 50, "num_replicas": 1}})
        until(lambda: ready(client) == 1, 20, "one replica is asked", there)
        until(lambda: served.count("decode", "STOPPING") == 0, 90, "it has gone", there)
        until(lambda: served.count("decode") == 1, 120, "the other one runs", there)
    assert_none_lost(load.stop())


def test_a_redeploy_loses_no_stream_and_keeps_the_orders(
    served: ServedApp, client: httpx.Client
) -> None:
    """Not even one that asks for keys from then on: clients may show theirs before."""
    order = client.put("/headrace/v1/router", json={"policy": "remote"})
    assert order.json() == {"policy": "remote", "replicas": 1}
    served.ask_for_keys()
    served.args["router"] = {"retry_max_s": 90}
    for role in ("prefill", "decode"):
        served.args[role]["replicas"] = 1
    with streams(served) as load:
        until(lambda: len(load.answers) >= STREAMS, 120, "streams run")
        before = {each["replica_id"] for each in replicas(client)}
        # Where autoscaling is switched on, Serve redeploys everything: here it does so anyway.
        served.deploy(autoscaled(upscale_delay_s=NEVER_S, downscale_delay_s=NEVER_S), fresh=True)
        until(lambda: served.status()["status"] == "DEPLOYING", 120, "the redeploy begins")
        with load.eased(PAUSE_S):
            served.wait_running(START_S)
            until(lambda: replicas(client) != [], 120, "replicas answer")
            until(
                lambda: not before & {each["replica_id"] for each in replicas(client)},
                90,
                "the old replicas have gone",
            )
        answered = len(load.answers)
        until(lambda: len(load.answers) >= answered + STREAMS, 120, "streams go on")
    assert_none_lost(load.stop())
    policies = [each["router"]["policy"] for each in replicas(client) if each["role"] == "decode"]
    assert policies and set(policies) == {"remote"}
    assert client.put("/headrace/v1/router", json={"policy": "cost"}).is_success


def test_scaling_by_load_loses_no_stream(served: ServedApp, client: httpx.Client) -> None:
    with streams(served) as load:

        def there() -> str:
            return f"{served.status()} {load}{served.logs()}"

        until(lambda: len(load.answers) >= STREAMS, 120, "streams run", there)
        # The load eases off while the second replica starts, and must not end it by that.
        served.deploy(autoscaled(upscale_delay_s=1.0, downscale_delay_s=NEVER_S))
        until(lambda: served.count("decode", "STARTING") == 1, 120, "a second one starts", there)
        with load.eased(PAUSE_S):
            until(lambda: ready(client) == 2, START_S, "a second one under load", there)
        answered = len(load.answers)
        until(lambda: len(load.answers) >= answered + STREAMS, 120, "streams go on", there)
    assert_none_lost(load.stop())
    served.deploy(autoscaled(upscale_delay_s=NEVER_S, downscale_delay_s=1.0))
    until(lambda: served.count("decode") == 1, 60, "one again after it", served.status)


def replicas(client: httpx.Client) -> list[dict[str, object]]:
    return list(client.get("/headrace/v1/status").json()["replicas"])
