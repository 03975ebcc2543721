"""An app with API keys and TLS, and with engines that cannot draft, which is the default.

The other files' app asks for no key, speaks plain HTTP, and can draft.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from headrace.config.keyfile import KeyEntry, KeyFile, hash_of, new_key, write_keys
from tests.support.app import MODEL, App, Session
from tests.support.certificates import Authority
from tests.support.exact import answer_by
from tests.support.prompts import exactness_prompts, noise, plain_prompts, text_ids
from tests.support.truth import plain_truth

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    session = Session()
    yield session
    session.clean()


KEYS = {name: new_key() for name in ("operator", "shop", "shop-2", "bank")}
BLOCK = 128
"""Tokens of a KV block on a CPU."""


@pytest.fixture(scope="module")
def app(session: Session, tmp_path_factory: pytest.TempPathFactory) -> App:
    folder = tmp_path_factory.mktemp("door")
    authority, file = Authority(folder), folder / "keys.yaml"
    cert, key = authority.issue("server")
    entries = [
        KeyEntry(
            name=name,
            hash=hash_of(secret.encode()),
            tenant=name.partition("-")[0],
            role="admin" if name == "operator" else "user",
        )
        for name, secret in KEYS.items()
    ]
    write_keys(file, KeyFile(keys=entries))
    settings = {
        "speculation.enabled": "false",
        "gateway.api_keys_file": str(file),
        "gateway.tls_cert_file": str(cert),
        "gateway.tls_key_file": str(key),
    }
    app = session.start(authority.client(), **settings)
    assert app.url.startswith("https://")
    app.client.headers.update(bearer("operator"))
    return app


def bearer(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer {KEYS[name]}"}


def cached_tokens(app: App, name: str, prompt: list[int], **body: Any) -> int:
    """Tokens of a prompt whose KV a key's request found: those that the engine did not compute."""

    def computed() -> int:
        app.wait_idle()
        return int(app.replica("decode")["prompt_tokens_computed"])

    before = computed()
    asked = {"model": MODEL, "prompt": prompt, "max_tokens": 1, **body}
    answer = app.client.post("/v1/completions", json=asked, headers=bearer(name))
    assert answer.status_code == 200, answer.text
    return len(prompt) - (computed() - before)


@pytest.mark.parametrize("way", ["local", "remote"])
def test_greedy_answers_are_those_of_a_plain_engine(app: App, model_folder: Path, way: str) -> None:
    prompts = [p for p in exactness_prompts(text_ids(model_folder)) if 63 <= len(p) <= 513][::2]
    assert len(prompts) >= 8
    with app.policy(way):
        answers = [answer_by(app, way, prompt) for prompt in prompts]
    truth = plain_truth(model_folder, plain_prompts(model_folder))
    assert not truth.differences(prompts, answers)


def test_what_needs_drafting_says_what_to_set(app: App) -> None:
    for method, path in (("GET", ""), ("PUT", "/c"), ("DELETE", "/c")):
        body = {"texts": ["x"]} if method == "PUT" else None
        answer = app.client.request(method, "/headrace/v1/memory" + path, json=body)
        assert answer.status_code == 409
        assert "set speculation.enabled: true" in answer.json()["error"]["message"]


def test_openais_client_chats_with_a_key_and_the_authoritys_certificate(app: App) -> None:
    messages: Any = [{"role": "user", "content": "The capital of France is"}]
    with (
        httpx.Client(verify=app.trust) as over_tls,
        openai.OpenAI(
            base_url=f"{app.url}/v1", api_key=KEYS["shop"], http_client=over_tls, max_retries=0
        ) as client,
    ):
        whole = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=8)
        stream = client.chat.completions.create(
            model=MODEL, messages=messages, max_tokens=8, stream=True
        )
        parts = [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]
        assert whole.choices[0].message.content and len(parts) > 1
    with (
        openai.OpenAI(base_url=f"{app.url}/v1", api_key=KEYS["shop"], max_retries=0) as client,
        pytest.raises(openai.APIConnectionError),  # it trusts the usual authorities only
    ):
        client.models.list()


def test_no_request_without_a_key_is_answered(app: App) -> None:
    for headers in ({}, {"authorization": "Bearer wrong"}):
        anyone = httpx.get(app.url + "/v1/models", headers=headers, verify=app.trust)
        assert anyone.status_code == 401
    assert httpx.get(app.url + "/health", verify=app.trust).status_code == 200


def test_keys_are_not_found_by_guessing(app: App) -> None:
    """Also what is nearly a key, and with a neighbour whose requests are answered meanwhile."""
    key = KEYS["shop"]
    guesses = [key[:-1], key + "x", key.swapcase(), key[1:], "Bearer", hash_of(key.encode())]
    guesses += [new_key() for _ in range(300)]
    with httpx.Client(base_url=app.url, verify=app.trust) as client:
        for guess in guesses:
            answer = client.get("/v1/models", headers={"authorization": f"Bearer {guess}"})
            assert answer.status_code == 401, guess
        assert client.get("/v1/models", headers=bearer("shop")).status_code == 200


def test_keys_of_one_tenant_share_kv_and_those_of_others_do_not(app: App) -> None:
    prompt = noise(3 * BLOCK + 1, 401)
    with app.policy("local"):
        assert cached_tokens(app, "shop", prompt) == 0
        assert cached_tokens(app, "shop-2", prompt) == 3 * BLOCK
        assert cached_tokens(app, "bank", prompt) == 0


def test_no_salt_of_a_clients_choice_reaches_another_tenants_kv(app: App) -> None:
    prompt = noise(3 * BLOCK + 1, 402)
    with app.policy("local"):
        assert cached_tokens(app, "shop", prompt, cache_salt="own") == 0
        for salt in ("own", "tenant:shop:own", ":shop:own", "shop"):
            assert cached_tokens(app, "bank", prompt, cache_salt=salt) == 0, salt
        assert cached_tokens(app, "shop", prompt, cache_salt="own") == 3 * BLOCK


def test_only_an_admin_key_administers(app: App) -> None:
    for method, path, body in (
        ("GET", "/headrace/v1/status", None),
        ("PUT", "/headrace/v1/router", {"policy": "local"}),
        ("GET", "/headrace/v1/memory", None),
    ):
        answer = app.client.request(method, path, json=body, headers=bearer("shop"))
        assert answer.status_code == 403, path
        assert answer.json()["error"]["code"] == "admin_only"


def test_the_command_line_has_an_admin_key_of_its_own(session: Session, app: App) -> None:
    command = [sys.executable, "-m", "headrace.cli", "status", "--json", "--name", session.name]
    said = subprocess.run(command, env=session.environment, capture_output=True, timeout=60)
    shown = json.loads(said.stdout)
    assert {replica["role"] for replica in shown["replicas"]} == {"prefill", "decode"}


def test_it_ends_and_leaves_nothing(session: Session, app: App) -> None:
    assert session.stop() == []
