"""Conversation state with several models: which model answers a turn, and what each one gets."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from headrace.config.key_file import KeyEntry, KeyFile, hash_of, write_keys
from headrace_decode.resume.emitted import RESUME
from headrace_engine.adapters.settings import AdapterSettings
from tests.unit.gateway_fakes import (
    BODY,
    RESPONSES,
    ROUTES,
    FakeCluster,
    FakeReplica,
    gateway_of_models,
    soon,
)
from tests.unit.responses_replica import respond, slow_respond, state_in, texts_of, until_ended
from tests.unit.test_gateway_models import told

THREE = {"small": [respond], "v1": [respond], "v2": [respond]}
ALIASES = {"gpt": "small", "chat": {"v1": 1, "v2": 1}}


class Bench:
    """A client of a gateway over several models, and what their replicas got."""

    def __init__(self, url: str, clusters: Mapping[str, FakeCluster], app: Any) -> None:
        self.url, self.clusters, self.app = url, clusters, app

    def client(self, key: str = "none") -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0)

    def replica(self, model: str) -> FakeReplica:
        return self.clusters[model].members[0]

    def sent(self, model: str) -> list[dict[str, Any]]:
        """The requests that the model's replica got."""
        return [json.loads(request[BODY]) for request in self.replica(model).seen]


@contextlib.asynccontextmanager
async def models(
    tmp_path: Path, served: Mapping[str, Sequence[Any]] = THREE, **options: Any
) -> AsyncIterator[Bench]:
    state = state_in(tmp_path)
    async with gateway_of_models(served, state=state, **options) as (client, clusters, app):
        yield Bench(str(client._base_url).rstrip("/"), clusters, app)


async def test_a_response_of_one_model_is_continued_by_another(tmp_path: Path) -> None:
    """The state is the app's: a turn says which model it asks, and each gets all earlier items."""
    async with models(tmp_path) as bench, bench.client() as client:
        first = await client.responses.create(model="small", input="One")
        second = await client.responses.create(
            model="v1", input="Two", previous_response_id=first.id
        )
        third = await client.responses.create(
            model="small", input="Three", previous_response_id=second.id
        )
        assert [each.model for each in (first, second, third)] == ["small", "v1", "small"]
        assert third.output_text == "5: Three"
        [continued] = bench.sent("v1")
        assert texts_of(continued) == ["One", "1: One", "Two"]


async def test_a_conversation_has_the_items_of_all_models(tmp_path: Path) -> None:
    async with models(tmp_path) as bench, bench.client() as client:
        made = await client.conversations.create()
        for model, text in (("small", "One"), ("v2", "Two")):
            await client.responses.create(model=model, input=text, conversation=made.id)
        listed = await client.conversations.items.list(made.id, order="asc")
        assert [item.role for item in listed.data] == ["user", "assistant"] * 2  # type: ignore[union-attr]
        assert texts_of(bench.sent("v2")[0]) == ["One", "1: One", "Two"]


async def test_an_alias_is_replaced_and_the_response_keeps_its_id(tmp_path: Path) -> None:
    async with models(tmp_path, aliases=ALIASES) as bench, bench.client() as client:
        first = await client.responses.create(model="gpt", input="One")
        second = await client.responses.create(
            model="gpt", input="Two", previous_response_id=first.id
        )
        for made, sent in zip((first, second), bench.sent("small"), strict=True):
            assert (made.model, sent["model"], sent["request_id"]) == ("small", "small", made.id)


@pytest.mark.parametrize("text", ["short", "long " * 1000])
@pytest.mark.parametrize("system", [True, False])
async def test_a_conversation_through_an_alias_stays_with_its_model(
    tmp_path: Path, text: str, system: bool
) -> None:
    """Whether its turns name the previous response, a conversation, or all earlier items."""
    async with models(tmp_path, aliases=ALIASES) as bench, bench.client() as client:
        answered = set()
        for number in range(8):
            user: Any = {"role": "user", "content": f"{number} {text}"}
            start: Any = [{"role": "system", "content": "S"}, user] if system else user["content"]
            ask = client.responses.create
            first = await ask(model="chat", input=start)
            made = await client.conversations.create()
            turns = [
                first,
                await ask(model="chat", input="Two", previous_response_id=first.id),
                await ask(model="chat", input=start, conversation=made.id),
                await ask(model="chat", input="Two", conversation=made.id),
                await ask(
                    model="chat",
                    input=[
                        *(start if system else [user]),
                        {"role": "assistant", "content": "Yes"},
                        {"role": "user", "content": "Two"},
                    ],
                    store=False,
                ),
            ]
            models_of_turns = {turn.model for turn in turns}
            assert len(models_of_turns) == 1
            answered |= models_of_turns
        assert answered == {"v1", "v2"}


async def test_items_that_were_added_first_tell_the_conversation(tmp_path: Path) -> None:
    """The first message of the user may be in the request that continues a conversation."""
    async with models(tmp_path, aliases=ALIASES) as bench, bench.client() as client:
        answered = set()
        for number in range(8):
            system: Any = {"role": "system", "content": "Be short."}
            made = await client.conversations.create(items=[system])
            ask = client.responses.create
            turns = [
                await ask(model="chat", input=text, conversation=made.id)
                for text in (f"{number}", "Two", "Three")
            ]
            assert len({turn.model for turn in turns}) == 1
            answered.add(turns[0].model)
        assert answered == {"v1", "v2"}


@pytest.mark.parametrize("model", ["v1", "v2"])
async def test_a_resumed_turn_stays_with_the_model_that_began_it(
    tmp_path: Path, model: str
) -> None:
    async with models(tmp_path, aliases=ALIASES) as bench, bench.client() as client:
        first = await client.responses.create(model="small", input="One")
        other = await client.responses.create(
            model="small", input="Two", previous_response_id=first.id
        )
        begun = {"response": {"id": other.id, "instructions": '"model":"v0"', "model": model}}
        received = b"event: response.created\ndata: %s\n\n" % json.dumps(begun).encode()
        fields = {"model": "chat", "input": "x", "stream": True, "previous_response_id": first.id}
        async with httpx.AsyncClient() as http:
            await http.post(
                bench.url + RESPONSES,
                content=received + json.dumps(fields).encode(),
                headers={"content-type": "application/json", RESUME.decode(): str(len(received))},
            )
        [sent] = bench.sent(model)
        assert (sent["model"], sent["request_id"]) == (model, other.id)


async def test_a_turn_with_an_adapter_goes_to_its_base_model(tmp_path: Path) -> None:
    adapters = {"v1": AdapterSettings("v1", {"sql": "/sql"}, group="v1")}
    async with models(tmp_path, adapters=adapters) as bench, bench.client() as client:
        first = await client.responses.create(model="small", input="One")
        await client.responses.create(model="sql", input="Two", previous_response_id=first.id)
        [sent] = bench.sent("v1")
        assert sent["model"] == "sql" and texts_of(sent) == ["One", "1: One", "Two"]


async def test_no_model_is_carried_over_from_the_previous_response(tmp_path: Path) -> None:
    async with models(tmp_path) as bench, bench.client() as client:
        first = await client.responses.create(model="small", input="One")
        with pytest.raises(openai.BadRequestError, match="model"):
            await client.responses.create(input="Two", previous_response_id=first.id)
        with pytest.raises(openai.NotFoundError) as refused:
            await client.responses.create(model="x", input="Two", previous_response_id=first.id)
        assert refused.value.code == "model_not_found"
    async with models(tmp_path, default_model="v1") as bench, bench.client() as client:
        await client.responses.create(input="Two", previous_response_id=first.id)
        assert texts_of(bench.sent("v1")[0]) == ["One", "1: One", "Two"]


async def test_a_keys_models_limit_who_answers_not_what_its_tenant_reads(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    keys = [
        KeyEntry(name=name, hash=hash_of(name.encode()), tenant="shop", models=allowed)
        for name, allowed in (("key-of-small-one", ["small"]), ("key-of-all-of-them", None))
    ]
    write_keys(file, KeyFile(keys=keys))
    async with (
        models(tmp_path, api_keys_file=str(file)) as bench,
        bench.client("key-of-small-one") as limited,
        bench.client("key-of-all-of-them") as free,
    ):
        first = await free.responses.create(model="v1", input="One")
        assert (await limited.responses.retrieve(first.id)).output_text == "1: One"
        with pytest.raises(openai.NotFoundError) as refused:
            await limited.responses.create(model="v1", input="Two", previous_response_id=first.id)
        assert refused.value.code == "model_not_found"
        second = await limited.responses.create(
            model="small", input="Two", previous_response_id=first.id
        )
        assert second.output_text == "3: Two"


async def test_a_model_without_the_route_keeps_nothing(tmp_path: Path) -> None:
    """Such as one that only embeds."""
    served = {"small": [respond], "embed": [told]}
    async with models(tmp_path, served) as bench, bench.client() as client:
        routes = tuple(each for each in ROUTES if not each.path.startswith(RESPONSES))
        bench.replica("embed").routes = routes
        await bench.app.start()
        pool = next(model.pool for model in bench.app.parts.models if model.model_id == "embed")
        await soon(lambda: pool.routes.routes == frozenset(routes))
        first = await client.responses.create(model="small", input="One")
        for background in (False, True):
            with pytest.raises(openai.NotFoundError):
                await client.responses.create(
                    model="embed",
                    input="Two",
                    previous_response_id=first.id,
                    background=background,
                )
        assert bench.sent("embed") == []


# Background responses


async def test_a_background_response_is_made_by_the_model_that_it_names(tmp_path: Path) -> None:
    options: dict[str, Any] = {"aliases": ALIASES, "default_model": "v2"}
    async with models(tmp_path, **options) as bench, bench.client() as client:
        for named, model in (("gpt", "small"), ("v1", "v1"), (None, "v2")):
            fields: dict[str, Any] = {} if named is None else {"model": named}
            made = await client.responses.create(**fields, input="One", background=True)
            done = await until_ended(client, made.id)
            assert (made.model, done.status, done.output_text) == (model, "completed", "1: One")
            assert len(bench.sent(model)) == 1


async def test_background_responses_of_a_stuck_model_take_no_places_of_another(
    tmp_path: Path,
) -> None:
    go = asyncio.Event()
    served = {"stuck": [slow_respond(go)], "small": [respond]}
    options: dict[str, Any] = {"max_concurrent": 1, "conversations": {"max_background": 2}}
    async with models(tmp_path, served, **options) as bench, bench.client() as client:
        ask = client.responses.create
        waiting = [await ask(model="stuck", input=text, background=True) for text in "ab"]
        await soon(lambda: len(bench.replica("stuck").seen) == 1)
        with pytest.raises(openai.RateLimitError, match="2 background responses of this model"):
            await ask(model="stuck", input="c", background=True)
        made = await ask(model="small", input="One", background=True)
        assert (await until_ended(client, made.id)).output_text == "1: One"
        assert (await ask(model="small", input="Two")).output_text == "1: Two"
        go.set()
        for each in waiting:
            assert (await until_ended(client, each.id)).status == "completed"
