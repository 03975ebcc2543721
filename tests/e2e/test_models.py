"""Three models at one endpoint: who answers, what they share, and what the death of one costs
the others."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.support import run
from tests.support.app import App, Session, until
from tests.support.faults import BACK_S, assert_end, children, failures
from tests.support.load import Load
from tests.support.prompts import TEXT
from tests.support.tiny import make_adapter, make_tiny_llama

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

MODELS = ("first", "second", "third")
ADAPTERS = {"sql": "first", "fr": "second"}
"""Models with a LoRA adapter, by its name."""
PROMPTS = [f"Chapter {n}, page {7 * n}. {TEXT}" for n in range(1, 5)]
ANSWER_TOKENS = 40


@pytest.fixture(scope="module")
def app() -> Iterator[App]:
    """An app with three tiny models, which differ in their weights only."""
    session = Session()
    settings = {
        f"models.{name}.model.source": str(make_tiny_llama(run.folder() / name, seed))
        for seed, name in enumerate(MODELS)
    }
    for seed, (adapter, model) in enumerate(ADAPTERS.items()):
        folder = make_adapter(run.folder() / adapter, seed)
        settings[f"models.{model}.model.adapters.{adapter}"] = str(folder)
    for role in ("prefill", "decode"):
        settings |= {f"{role}.cpus": "0.1", f"{role}.kv_cache_gb": "0.02"}
        settings[f"{role}.engine.max_num_seqs"] = "16"
    try:
        yield session.start(
            **settings,
            **{
                "model.max_model_len": "2048",
                "models.third.router.policy": "local",
                "gateway.aliases": "{chat: {first: 1, second: 1}, gpt: third}",
                "gateway.default_model": "gpt",
                "speculation.enabled": "false",
                "techniques.blending.mode": '"off"',
                "store.dram_gb": "0.02",
            },
        )
        run.engine_started(4)
        assert session.stop() == []
    finally:
        session.clean()


def answer(app: App, model: str | None, prompt: str = PROMPTS[0]) -> tuple[str, str]:
    """The model that answers, and its text."""
    found = app.complete(prompt, model=model)
    return found["model"], found["choices"][0]["text"]


def test_each_model_answers_by_its_name(client: openai.OpenAI) -> None:
    texts = set()
    for model in MODELS:
        messages = [{"role": "user", "content": "Hello"}]
        found = client.chat.completions.create(model=model, messages=messages, max_tokens=8)  # type: ignore[arg-type]
        assert found.model == model
        texts.add(found.choices[0].message.content)
    assert len(texts) == len(MODELS)


def test_an_alias_means_a_model_and_no_name_means_the_default(app: App) -> None:
    assert answer(app, "gpt")[0] == answer(app, None)[0] == "third"
    by = {answer(app, "chat", f"{n} {TEXT}")[0] for n in range(16)}
    assert by == {"first", "second"}


def test_an_unknown_model_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.completions.create(model="fourth", prompt="Hello")
    listed = {model.id: (model.model_extra or {}).get("parent") for model in client.models.list()}
    assert listed == {**dict.fromkeys([*MODELS, "chat", "gpt"]), **ADAPTERS}


def test_an_adapter_is_one_of_its_model(app: App) -> None:
    texts = {}
    for name in (*ADAPTERS, "first", "second"):
        model, texts[name] = answer(app, name, PROMPTS[2])
        assert model == name
    assert len({*texts.values()}) == len(texts)
    added = str(make_adapter(run.folder() / "added", 7))
    load = {"lora_name": "added", "lora_path": added, "model": "second"}
    said = app.client.post("/v1/load_lora_adapter", json=load)
    assert said.status_code == 200, said.text
    assert len(said.json()["replicas"]) == 2
    assert answer(app, "added", PROMPTS[2])[1] not in texts.values()
    unload = {"lora_name": "added", "model": "second"}
    assert app.client.post("/v1/unload_lora_adapter", json=unload).status_code == 200
    assert answer(app, "fr", PROMPTS[2])[1] == texts["fr"]


def test_a_response_is_continued_by_another_model_and_by_an_adapter(client: openai.OpenAI) -> None:
    """As if the client sent all items itself; a conversation through an alias keeps its model."""
    short: dict[str, Any] = {"temperature": 0, "max_output_tokens": 8}
    previous: str | None = None
    whole: list[Any] = []
    for number, model in enumerate(("first", "second", "fr", "gpt")):
        text = f"Turn {number}"
        whole.append({"role": "user", "content": text})
        sent = client.responses.create(model=model, input=whole, store=False, **short)
        kept = client.responses.create(
            model=model, input=text, previous_response_id=previous, **short
        )
        assert (kept.output_text, kept.model) == (sent.output_text, sent.model)
        whole += sent.output
        previous = kept.id
    for number in range(4):
        previous = None
        by = set()
        for text in (f"Conversation {number}", "Go on", "Go on"):
            turn = client.responses.create(
                model="chat", input=text, previous_response_id=previous, **short
            )
            by.add(turn.model)
            previous = turn.id
        assert len(by) == 1
    made = client.responses.create(model="third", input="Later", background=True, **short)
    ended = ("completed", "incomplete")
    until(lambda: client.responses.retrieve(made.id).status in ended, 60, "the response")
    assert client.responses.retrieve(made.id).model == made.model == "third"


def test_models_share_a_store_and_no_block_of_it(app: App) -> None:
    """They differ in their weights only, so a block of another one would give wrong tokens."""
    alone = {model: answer(app, model, PROMPTS[1]) for model in MODELS}
    assert len({text for _, text in alone.values()}) == len(MODELS)
    assert {model: answer(app, model, PROMPTS[1]) for model in MODELS} == alone
    for model in MODELS:
        warm = {"prompts": [PROMPTS[1]], "model": model, "pin": True}
        [[outcome]] = app.client.post("/headrace/v1/warm", json=warm).json()["prompts"]
        assert outcome["pinned_tokens"] > 0, outcome
    [machine] = app.get("/headrace/v1/store")["machines"]
    assert len({pin["namespace"] for pin in machine["pins"]}) == len(MODELS)
    assert app.client.post("/headrace/v1/store", json={"action": "unpin"}).status_code == 200


def test_the_status_and_the_metrics_know_the_models(app: App) -> None:
    status = app.status()
    assert {(one["model"], one["deployment"]) for one in status["replicas"]} == {
        (model, f"{role}-{model}") for model in MODELS for role in ("prefill", "decode")
    }
    assert status["health"]["state"] == "ok", status["health"]
    policies = {
        one["model"]: one["router"]["policy"]
        for one in status["replicas"]
        if one["role"] == "decode"
    }
    assert policies == {"first": "cost", "second": "cost", "third": "local"}
    page = app.client.get("/metrics?name[]=ray_headrace_gateway_ready_replicas").text
    for model in MODELS:
        assert f'model="{model}"' in page


def test_the_engines_of_one_model_die_under_load_and_no_other_model_has_an_error(app: App) -> None:
    dying, *others = MODELS
    killed = [one["pid"] for one in app.status()["replicas"] if one["model"] == dying]
    assert len(killed) == 2
    loads = [
        Load(app.url, PROMPTS, clients=2, max_tokens=ANSWER_TOKENS, model=model) for model in others
    ]
    with loads[0], loads[1], Load(app.url, PROMPTS, clients=2, max_tokens=8, model=dying) as lost:
        until(lambda: all(len(load.answers) >= 4 for load in loads), 240, "load", app.status)
        orphans = [each for pid in killed for each in children(pid)]
        for pid in killed:
            os.kill(pid, signal.SIGKILL)
        before = [len(load.answers) for load in loads]
        health = app.status()["health"]
        assert health["state"] in ("ok", "degraded"), health
        for load, count in zip(loads, before, strict=True):
            until(lambda load=load, count=count: len(load.answers) >= count + 8, 240, "more")  # type: ignore[misc]
        lost.pause()
        until(lambda: back(app, dying, killed), BACK_S, "other replicas", app.status, every_s=1.0)
    run.engine_started(2)
    for load in loads:
        assert not failures(load.stop()), "a request for another model failed"
    assert_end(orphans)
    assert not {one["pid"] for one in app.status()["replicas"] if one["model"] in others} & {
        *killed
    }
    assert answer(app, dying)[0] == dying


def back(app: App, model: str, killed: list[int]) -> bool:
    """Whether the model has both roles again."""
    pids = {one["pid"] for one in app.status()["replicas"] if one["model"] == model}
    return len(pids) == 2 and not pids & {*killed}
