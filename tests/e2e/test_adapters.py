"""LoRA adapters through the gateway: each answer is a plain engine's, prefilled here or remotely,
and an adapter that is replaced under its name never answers with old KV."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from headrace_engine.adapters.registry import CHECK_S
from tests.support.prompts import noise
from tests.support.served import MODEL, ServedApp, free_port, tiny_args
from tests.support.stored import StoredEngine
from tests.support.tiny import make_adapter, tiny_llama

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]

PROMPT = noise(700, 5)
"""Five full blocks, so that KV is cached, stored and pulled."""
TOKENS = 8
SEEDS = {"sql": 1, "fr": 2, f"{MODEL}:legal": 3, "added": 4, "sql again": 5}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder of each adapter."""
    root = tmp_path_factory.mktemp("adapters")
    names = {name: name.rpartition(":")[2].replace(" ", "-") for name in SEEDS}
    return {
        name: make_adapter(root / ("all" if ":" in name else "one") / names[name], seed)
        for name, seed in SEEDS.items()
    }


@pytest.fixture(scope="module")
def truth(folders: dict[str, Path]) -> Iterator[dict[str, list[int]]]:
    """A plain engine's answers, by adapter."""
    engine = StoredEngine(str(tiny_llama()), None, False, enable_lora=True, max_loras=2)
    try:
        engine.ready()
        answers = {MODEL: engine.answers([PROMPT], max_tokens=TOKENS)[0].tokens}
        for number, (name, folder) in enumerate(folders.items(), 1):
            [answer] = engine.answers([PROMPT], max_tokens=TOKENS, adapter=(number, str(folder)))
            answers[name] = answer.tokens
    finally:
        engine.kill()
    assert len({tuple(tokens) for tokens in answers.values()}) == len(answers)
    return answers


@pytest.fixture(scope="module")
def app(folders: dict[str, Path], truth: Any) -> Iterator[ServedApp]:
    """One gateway, two decode replicas and a prefill replica with adapters."""
    args = tiny_args(free_port())
    args["gateway"]["replicas"] = args["prefill"]["replicas"] = 1
    args["model"] |= {
        "adapters": {name: str(folders[name]) for name in ("sql", "fr")},
        "adapters_path": str(folders[f"{MODEL}:legal"].parent),
    }
    with ServedApp(args) as running:
        yield running


@pytest.fixture(scope="module")
def client(app: ServedApp) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{app.url}/v1", api_key="none", timeout=120) as client:
        yield client


def answer(client: openai.OpenAI, model: str, salt: str = "") -> list[int]:
    """The tokens of a greedy answer."""
    reply = client.completions.create(
        model=model,
        prompt=PROMPT,
        max_tokens=TOKENS,
        temperature=0,
        extra_body={"return_token_ids": True, **({"cache_salt": salt} if salt else {})},
    )
    assert reply.model == model
    return list(reply.choices[0].model_extra["token_ids"])  # type: ignore[index]


def set_policy(app: ServedApp, policy: str) -> None:
    httpx.put(f"{app.url}/headrace/v1/router", json={"policy": policy}).raise_for_status()


def remote_plans(app: ServedApp) -> int:
    return int(httpx.get(f"{app.url}/headrace/v1/status", timeout=60).json()["plans"]["remote"])


def test_the_models_are_the_base_and_each_adapter(client: openai.OpenAI) -> None:
    found = {model.id: (model.model_extra or {}).get("parent") for model in client.models.list()}
    assert found == {MODEL: None, "sql": MODEL, "fr": MODEL, f"{MODEL}:legal": MODEL}
    assert client.models.retrieve(f"{MODEL}:legal").id == f"{MODEL}:legal"


@pytest.mark.parametrize("policy", ["local", "remote"])
def test_each_adapter_answers_as_a_plain_engine(
    app: ServedApp, client: openai.OpenAI, truth: dict[str, list[int]], policy: str
) -> None:
    set_policy(app, policy)
    before = remote_plans(app)
    names = [MODEL, "sql", "fr", f"{MODEL}:legal"]
    for turn in range(2):  # computed, then from caches and the store
        for name in names:
            assert answer(client, name, policy) == truth[name], (turn, name)
    remote = remote_plans(app) - before
    assert remote == (2 * len(names) if policy == "remote" else 0)
    set_policy(app, "cost")


def test_a_conversation_is_continued_by_an_adapter(client: openai.OpenAI) -> None:
    """Its prompt is the one that a client sends whole to the adapter."""
    short: Any = {"temperature": 0, "max_output_tokens": TOKENS}
    first = client.responses.create(model=MODEL, input="One", **short)
    kept = client.responses.create(model="sql", input="Two", previous_response_id=first.id, **short)
    whole: Any = [{"role": "user", "content": "One"}, *first.output]
    whole.append({"role": "user", "content": "Two"})
    sent = client.responses.create(model="sql", input=whole, store=False, **short)
    assert kept.model == "sql" and kept.output_text == sent.output_text
    assert kept.usage and sent.usage and kept.usage.input_tokens == sent.usage.input_tokens


def test_an_unknown_adapter_is_no_model(client: openai.OpenAI) -> None:
    for name in ("none", f"{MODEL}:none", "../sql"):
        with pytest.raises(openai.NotFoundError):
            answer(client, name)


def test_an_adapter_replaced_under_its_name_never_answers_with_old_kv(
    app: ServedApp,
    client: openai.OpenAI,
    truth: dict[str, list[int]],
    folders: dict[str, Path],
) -> None:
    assert answer(client, "sql") == truth["sql"]
    new = folders["sql"].with_name("new")
    shutil.copytree(folders["sql again"], new)
    old = folders["sql"].rename(folders["sql"].with_name("old"))
    new.rename(folders["sql"])
    time.sleep(CHECK_S)
    for policy in ("local", "remote"):
        set_policy(app, policy)
        for _ in range(3):
            assert answer(client, "sql") == truth["sql again"]
    shutil.rmtree(folders["sql"])
    old.rename(folders["sql"])
    time.sleep(CHECK_S)
    assert answer(client, "sql") == truth["sql"]
    set_policy(app, "cost")


def test_administrators_load_and_unload_adapters_at_all_replicas(
    app: ServedApp,
    client: openai.OpenAI,
    truth: dict[str, list[int]],
    folders: dict[str, Path],
) -> None:
    body = {"lora_name": "added", "lora_path": str(folders["added"])}
    said = httpx.post(f"{app.url}/v1/load_lora_adapter", json=body, timeout=120)
    assert said.status_code == 200, said.text
    assert len(said.json()["replicas"]) == 3
    for _ in range(4):
        assert answer(client, "added") == truth["added"]
    again = httpx.post(f"{app.url}/v1/load_lora_adapter", json=body, timeout=120)
    assert again.status_code == 400
    bad = {"lora_name": "bad", "lora_path": str(folders["added"].parent)}
    refused = httpx.post(f"{app.url}/v1/load_lora_adapter", json=bad, timeout=120)
    assert refused.status_code == 400 and "adapter_config.json" in refused.text
    name = {"lora_name": "added"}
    httpx.post(f"{app.url}/v1/unload_lora_adapter", json=name, timeout=120).raise_for_status()
    with pytest.raises(openai.NotFoundError):
        answer(client, "added")
    assert "added" not in {model.id for model in client.models.list()}


def test_replicas_tell_what_they_have_loaded(app: ServedApp) -> None:
    replicas = httpx.get(f"{app.url}/headrace/v1/status", timeout=60).json()["replicas"]
    for replica in replicas:
        assert {"sql", "fr"} <= set(replica["adapters"]["loaded"])
        assert replica["adapters"]["loads"] > 0 and replica["adapters"]["load_s"] > 0
