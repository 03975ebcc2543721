"""An app with API keys and TLS, and with engines that cannot draft, which is the default.

It is the app of `test_scaling`, whose redeploy made it ask for keys. The other files' app asks for
no key, speaks plain HTTP, and can draft.
"""

from __future__ import annotations

import csv
import io
import os
import ssl
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai
import pytest

from headrace.cli.show import usage
from headrace.config.key_file import hash_of, new_key
from tests.support.app import App, until
from tests.support.browser import Browser
from tests.support.exact import answer_by
from tests.support.prompts import LENGTHS, exactness_prompts, noise, plain_prompts, text_ids
from tests.support.served import MODEL, START_S, ServedApp
from tests.support.tiny import tiny_llama
from tests.support.truth import plain_truth

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

BLOCK = 128
"""Tokens of a KV block on a CPU."""


@pytest.fixture(scope="module")
def app(served: ServedApp) -> Iterator[App]:
    """As an operator's clients see it."""
    trust = ssl.create_default_context(cafile=os.environ["SSL_CERT_FILE"])
    app = App(served.url, "served", "none", served.folder, trust=trust, model=MODEL)
    app.client.headers.update(served.bearer("operator"))
    if not served.asks_for_keys:  # this file runs alone
        served.ask_for_keys()
        for role in ("prefill", "decode"):
            served.args[role]["replicas"] = 1
        served.deploy(fresh=True)
        until(lambda: served.status()["status"] == "DEPLOYING", 30, "the redeploy begins")
        served.wait_running(START_S)

    def roles() -> list[str]:
        return sorted(replica["role"] for replica in app.status()["replicas"])

    until(lambda: roles() == ["decode", "prefill"], 90, "one replica of each role", roles)
    # A gateway sends requests to a replica that Serve stops until it hears of that.
    until(lambda: app.get("/health")["replicas_ready"] == 1, 60, "the gateway knows it", roles)
    yield app
    app.client.close()  # a gateway that stops waits for clients that keep a connection open


Cached = Callable[..., int]


@pytest.fixture
def cached_tokens(app: App, served: ServedApp) -> Cached:
    """Tokens of a prompt whose KV a key's request found: those that the engine did not compute."""

    def computed() -> int:
        app.wait_idle()
        return int(app.replica("decode")["prompt_tokens_computed"])

    def cached(name: str, prompt: list[int], **body: Any) -> int:
        before = computed()
        app.complete(prompt, headers=served.bearer(name), max_tokens=1, **body)
        return len(prompt) - (computed() - before)

    return cached


@pytest.mark.parametrize("way", ["local", "remote"])
def test_greedy_answers_are_those_of_a_plain_engine(app: App, way: str) -> None:
    """Of prompts of all lengths around every boundary."""
    prompts = exactness_prompts(text_ids(tiny_llama()))
    assert [len(prompt) for prompt in prompts] == list(LENGTHS)
    with app.policy(way):
        answers = [answer_by(app, way, prompt) for prompt in prompts]
    truth = plain_truth(tiny_llama(), plain_prompts(tiny_llama()))
    assert not truth.differences(prompts, answers)


def test_what_needs_drafting_says_what_to_set(app: App) -> None:
    for method, path in (("GET", ""), ("PUT", "/c"), ("DELETE", "/c")):
        body = {"texts": ["x"]} if method == "PUT" else None
        answer = app.client.request(method, "/headrace/v1/corpora" + path, json=body)
        assert answer.status_code == 409
        assert "set speculation.enabled: true" in answer.json()["error"]["message"]


def test_openais_client_chats_with_a_key_and_the_authoritys_certificate(
    app: App, served: ServedApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages: Any = [{"role": "user", "content": "The capital of France is"}]
    with (
        httpx.Client(verify=app.trust) as over_tls,
        openai.OpenAI(
            base_url=f"{app.url}/v1",
            api_key=served.keys["shop"],
            http_client=over_tls,
            max_retries=0,
        ) as client,
    ):
        whole = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=8)
        stream = client.chat.completions.create(
            model=MODEL, messages=messages, max_tokens=8, stream=True
        )
        parts = [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]
        assert whole.choices[0].message.content and len(parts) > 1
    monkeypatch.delenv("SSL_CERT_FILE")
    with (
        openai.OpenAI(
            base_url=f"{app.url}/v1", api_key=served.keys["shop"], max_retries=0
        ) as client,
        pytest.raises(openai.APIConnectionError),  # it trusts the usual authorities only
    ):
        client.models.list()


def test_no_request_without_a_key_is_answered(app: App) -> None:
    for headers in ({}, {"authorization": "Bearer wrong"}):
        anyone = httpx.get(app.url + "/v1/models", headers=headers, verify=app.trust)
        assert anyone.status_code == 401
    assert httpx.get(app.url + "/health", verify=app.trust).status_code == 200


def test_keys_are_not_found_by_guessing(app: App, served: ServedApp) -> None:
    """Also what is nearly a key, and with a neighbour whose requests are answered meanwhile."""
    key = served.keys["shop"]
    guesses = [key[:-1], key + "x", key.swapcase(), key[1:], "Bearer", hash_of(key.encode())]
    guesses += [new_key() for _ in range(300)]
    with httpx.Client(base_url=app.url, verify=app.trust) as client:
        for guess in guesses:
            answer = client.get("/v1/models", headers={"authorization": f"Bearer {guess}"})
            assert answer.status_code == 401, guess
        assert client.get("/v1/models", headers=served.bearer("shop")).status_code == 200


def test_keys_of_one_tenant_share_kv_and_those_of_others_do_not(
    app: App, cached_tokens: Cached
) -> None:
    prompt = noise(3 * BLOCK + 1, 401)
    with app.policy("local"):
        assert cached_tokens("shop", prompt) == 0
        assert cached_tokens("shop-2", prompt) == 3 * BLOCK
        assert cached_tokens("bank", prompt) == 0


def test_no_salt_of_a_clients_choice_reaches_another_tenants_kv(
    app: App, cached_tokens: Cached
) -> None:
    prompt = noise(3 * BLOCK + 1, 402)
    with app.policy("local"):
        assert cached_tokens("shop", prompt, cache_salt="own") == 0
        for salt in ("own", "tenant:shop:own", ":shop:own", "shop"):
            assert cached_tokens("bank", prompt, cache_salt=salt) == 0, salt
        assert cached_tokens("shop", prompt, cache_salt="own") == 3 * BLOCK


def test_only_an_admin_key_administers(app: App, served: ServedApp) -> None:
    for method, path, body in (
        ("GET", "/headrace/v1/status", None),
        ("PUT", "/headrace/v1/router", {"policy": "local"}),
        ("GET", "/headrace/v1/corpora", None),
    ):
        answer = app.client.request(method, path, json=body, headers=served.bearer("shop"))
        assert answer.status_code == 403, path
        assert answer.json()["error"]["code"] == "admin_only"


def test_a_tenant_sees_what_its_requests_cost_and_an_administrator_sees_all(
    app: App, served: ServedApp, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prompt, shop, bank = noise(3 * BLOCK + 1, 403), served.bearer("shop"), served.bearer("bank")
    for way, source in (("local", "computed_tokens"), ("remote", "pulled_tokens")):
        before = requests(app, shop)
        prompt = [*prompt[1:], prompt[0]]
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 4, "temperature": 0}
        with app.policy(way):
            answer = app.client.post("/v1/completions", json=body, headers=shop)
        assert answer.status_code == 200
        told = dict(each.split("=") for each in answer.headers["x-headrace-usage"].split(", "))
        assert int(told["prompt_tokens"]) == len(prompt) and int(told["output_tokens"]) == 4
        assert int(told[source]) >= len(prompt) - 1 and float(told["engine_s"]) > 0
        path = f"/headrace/v1/usage/{answer.headers['x-request-id']}"
        document = app.client.get(path, headers=shop).json()
        assert document["complete"] and len(document["parts"]) == (1 if way == "local" else 2)
        found = {name: value for name, value in document["usage"].items() if value}
        assert found == {name: pytest.approx(float(value)) for name, value in told.items()}
        assert app.client.get(path, headers=bank).status_code == 404
        more = before + 1
        until(lambda: requests(app, shop) >= more, 30, "gateways hear of it")  # noqa: B023
    assert app.client.get("/headrace/v1/usage?tenant=shop", headers=bank).status_code == 403

    monkeypatch.setenv("HEADRACE_URL", app.url)
    monkeypatch.setenv("HEADRACE_CA_FILE", os.environ["SSL_CERT_FILE"])
    monkeypatch.setenv("HEADRACE_API_KEY", served.keys["operator"])
    usage.usage(None, {"tenant": "shop", "since": "24h"}, as_csv=True, as_json=False)
    [row] = csv.DictReader(io.StringIO(capsys.readouterr().out))
    assert row["tenant"] == "shop" and row["model"] == MODEL and int(row["requests"]) >= 2


def requests(app: App, headers: dict[str, str]) -> int:
    """A tenant's requests in the sums of usage."""
    rows = app.client.get("/headrace/v1/usage?since=24h", headers=headers).json()["usage"]
    return int(rows[0]["requests"]) if rows else 0


def test_the_console_shows_nothing_and_orders_nothing_without_an_administrators_key(
    app: App, served: ServedApp, browser: Browser
) -> None:
    browser.open(f"{app.url}/console")
    until(lambda: "key" in browser.text("[role=alert]").lower(), 30, "it asks for a key")
    assert browser.text("table") == ""

    def show(key: str) -> None:
        browser.run("document.querySelector('#key').value = ''")
        browser.type("#key", key)
        browser.click("button[type=submit]")

    show(served.keys["shop"])
    until(lambda: "admin" in browser.text("[role=alert]"), 30, "a tenant's key is not enough")
    assert browser.text("table") == ""
    show(served.keys["operator"])
    until(lambda: "Updated" in browser.text("#updated"), 30, "the app is shown")
    assert "?" not in browser.run("return location.href"), "a key is never in a URL"
