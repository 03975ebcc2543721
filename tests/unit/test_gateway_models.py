"""Several models at one gateway: who answers a request, what a key may use, and what is shared."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter
from functools import partial
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
from aiohttp import ClientResponse, web

from headrace.config.key_file import KeyEntry, KeyFile, hash_of, write_keys
from headrace.gateway.errors import ApiError
from headrace.gateway.ingress.api_keys import ANONYMOUS
from headrace.gateway.models.model_names import ModelNames
from headrace.gateway.models.model_table import ModelTable
from headrace.gateway.relay import client_resume
from headrace.gateway.relay.call import Call
from headrace_decode.http.public_routes import Route
from headrace_engine.adapters.settings import AdapterSettings
from tests.unit.gateway_fakes import (
    BODY,
    CHAT,
    ROUTES,
    FakeReplica,
    abort_connection,
    gateway_of_models,
    soon,
    stall,
    stream,
)

MODELS = "/v1/models"


async def told(replica: FakeReplica, request: web.Request) -> web.StreamResponse:
    """An answer that tells who gave it, or the replica's list of its own model."""
    if request.path == MODELS:
        name = replica.replica_id.rpartition("-")[0]
        card = {"id": name, "object": "model", "max_model_len": 512}
        return web.json_response({"object": "list", "data": [card]})
    return web.json_response({"by": replica.replica_id})


def prompt(model: Any = None, text: str = "Hi") -> dict[str, Any]:
    named = {} if model is None else {"model": model}
    return {**named, "messages": [{"role": "user", "content": text}]}


async def error_of(response: ClientResponse) -> tuple[int, str, str | None]:
    error = (await response.json())["error"]
    return response.status, error["code"], error["param"]


THREE = {"small": [told], "v1": [told], "v2": [told]}
ALIASES = {"gpt": "small", "chat": {"v1": 1, "v2": 1}}


async def test_the_model_in_the_body_answers_and_gets_the_clients_bytes() -> None:
    async with gateway_of_models(THREE) as (client, clusters, _):
        for model in THREE:
            body = b'{ "messages" :[], "x": 1.0,  "model":"%s" }' % model.encode()
            headers = {"content-type": "application/json"}
            response = await client.post(CHAT, data=body, headers=headers)
            assert await response.json() == {"by": f"{model}-1"}
            [seen] = clusters[model].members[0].seen
            assert seen[BODY] == body


async def test_an_alias_is_replaced_by_the_models_name_and_all_other_bytes_stay() -> None:
    async with gateway_of_models(THREE, aliases=ALIASES) as (client, clusters, _):
        body = b'{"x": [1.0, {"a" : "\\u00e9"}], "model" : "gpt", "messages": [ ]}'
        headers = {"content-type": "application/json"}
        assert (await client.post(CHAT, data=body, headers=headers)).status == 200
        [seen] = clusters["small"].members[0].seen
        assert seen[BODY] == b'{"x":[1.0, {"a" : "\\u00e9"}],"model":"small","messages":[ ]}'


async def test_one_model_can_have_aliases_and_still_gets_unknown_names() -> None:
    async with gateway_of_models({"only": [told]}, aliases={"gpt": "only"}) as (client, seen, _):
        for name in ("gpt", "adapter"):
            assert (await client.post(CHAT, json=prompt(name))).status == 200
        requests = seen["only"].members[0].seen
        assert [json.loads(each[BODY])["model"] for each in requests] == ["only", "adapter"]


async def test_a_conversation_stays_with_its_model_and_others_go_to_others() -> None:
    async with gateway_of_models(THREE, aliases=ALIASES) as (client, clusters, _):
        for text in "abcdefghijklmnop":
            body = prompt("chat", text)
            answers = set()
            for _turn in range(3):
                answers.add((await (await client.post(CHAT, json=body)).json())["by"])
                body["messages"] += [{"role": "assistant", "content": "y"}, *prompt()["messages"]]
            assert len(answers) == 1
        assert not clusters["small"].members[0].seen
        assert clusters["v1"].members[0].seen and clusters["v2"].members[0].seen


async def test_a_stream_is_resumed_by_its_model_although_the_weights_have_changed() -> None:
    names = ModelNames(("v1", "v2"), {"chat": {"v1": 1.0, "v2": 1e-9}})
    models: Any = [SimpleNamespace(model_id=name) for name in names.models]
    table = ModelTable(models, names)

    async def chosen(name: str, resumed: str = "") -> str:
        asked = table.asked(prompt(name), ANONYMOUS)
        return (await table.choose(asked, ANONYMOUS, resumed)).model_id

    found = [await chosen("chat", resumed) for resumed in ("", "v2", "v3")]
    assert found == ["v1", "v2", "v1"]
    assert await chosen("v1", "v2") == "v1"


async def test_the_clients_part_of_a_stream_names_its_model() -> None:
    part = b'data: {"id":"a","choices":[{"text":"\\"model\\":\\"v1\\""}],"model": "v2"}\n\n'
    call = Call(b"id", "POST", CHAT, [], body=part + b"{}", route=Route("POST", CHAT))
    with contextlib.suppress(ApiError):  # there are no lines to resume from
        await client_resume.prepare(call, b"%d" % len(part))
    assert call.resumed_model == "v2"


@pytest.mark.parametrize(
    ("model", "found"),
    [
        ("large", (404, "model_not_found", "model")),
        (None, (400, "missing_required_parameter", "model")),
        (7, (400, "invalid_value", "model")),
        (["small"], (400, "invalid_value", "model")),
    ],
)
async def test_a_request_for_no_model_is_refused(model: Any, found: object) -> None:
    async with gateway_of_models(THREE) as (client, clusters, _):
        assert await error_of(await client.post(CHAT, json=prompt(model))) == found
        assert not any(cluster.members[0].seen for cluster in clusters.values())


@pytest.mark.parametrize("default", ["v2", "gpt"])
async def test_the_default_answers_requests_without_a_model(default: str) -> None:
    options = {"aliases": ALIASES, "default_model": default}
    async with gateway_of_models(THREE, **options) as (client, _, _app):
        answer = await (await client.post(CHAT, json=prompt())).json()
        assert answer == {"by": {"v2": "v2-1", "gpt": "small-1"}[default]}
        assert (await client.get("/v1/responses/resp_1")).status == 200


async def test_a_body_that_is_no_json_is_told_so() -> None:
    async with gateway_of_models(THREE) as (client, _, _app):
        headers = {"content-type": "application/json"}
        response = await client.post(CHAT, data=b"{", headers=headers)
        assert (await error_of(response))[:2] == (400, "invalid_json")


async def test_a_route_that_only_other_models_have_is_refused() -> None:
    async with gateway_of_models({"chats": [told], "embeds": [told]}) as (client, clusters, app):
        embeds = tuple(each for each in ROUTES if each.path != CHAT)
        clusters["embeds"].members[0].routes = embeds
        assert (await client.get("/health")).status == 200
        assert app.parts is not None
        pool = next(model.pool for model in app.parts.models if model.model_id == "embeds")
        await soon(lambda: pool.routes.routes == frozenset(embeds))
        assert (await client.post(CHAT, json=prompt("chats"))).status == 200
        assert (await client.post(CHAT, json=prompt("embeds"))).status == 404


class TestList:
    """`GET /v1/models`."""

    async def test_has_what_replicas_tell_and_the_aliases(self) -> None:
        async with gateway_of_models(THREE, aliases=ALIASES) as (client, _, _app):
            cards = (await (await client.get(MODELS)).json())["data"]
            assert [card["id"] for card in cards] == ["small", "v1", "v2", "gpt", "chat"]
            assert [card.get("max_model_len") for card in cards] == [512] * 3 + [None] * 2
            card = await (await client.get(f"{MODELS}/chat")).json()
            assert card["id"] == "chat" and card["object"] == "model"
            assert (await client.get(f"{MODELS}/large")).status == 404
            assert (await client.post(MODELS, json={})).status == 405

    async def test_has_models_without_a_replica_at_once(self) -> None:
        async with gateway_of_models({"up": [told], "down": []}) as (client, _, _app):
            async with asyncio.timeout(10):
                cards = (await (await client.get(MODELS)).json())["data"]
            assert [card["id"] for card in cards] == ["up", "down"]

    async def test_of_one_model_without_names_is_the_replicas_own(self) -> None:
        async with gateway_of_models({"only": [told]}) as (client, _, _app):
            cards = (await (await client.get(MODELS)).json())["data"]
            assert cards == [{"id": "only", "object": "model", "max_model_len": 512}]


class TestKeys:
    """A key that is limited to models."""

    @pytest.fixture
    def key_file(self, tmp_path: Path) -> str:
        def entry(name: str, models: list[str] | None) -> KeyEntry:
            return KeyEntry(name=name, hash=hash_of(name.encode()), tenant=name, models=models)

        file = tmp_path / "keys.yaml"
        entries = [entry("all-models", None), entry("only-chat", ["chat"])]
        write_keys(file, KeyFile(keys=[*entries, entry("only-v1", ["v1"])]))
        return str(file)

    async def test_gets_404_for_all_others(self, key_file: str) -> None:
        options = {"aliases": ALIASES, "api_keys_file": key_file, "default_model": "small"}
        async with gateway_of_models(THREE, **options) as (client, _, _app):

            async def status(key: str, model: str | None) -> int:
                headers = {"authorization": f"Bearer {key}"}
                return (await client.post(CHAT, json=prompt(model), headers=headers)).status

            names = ("small", "v1", "gpt", "chat", None)
            assert [await status("all-models", name) for name in names] == [200] * 5
            assert [await status("only-chat", name) for name in names] == [404] * 3 + [200, 404]
            assert [await status("only-v1", name) for name in names] == [404, 200, *[404] * 3]

    async def test_sees_its_own_in_the_list(self, key_file: str) -> None:
        options = {"aliases": ALIASES, "api_keys_file": key_file}
        async with gateway_of_models(THREE, **options) as (client, _, _app):
            for key, names in {"only-chat": ["chat"], "only-v1": ["v1"]}.items():
                headers = {"authorization": f"Bearer {key}"}
                cards = (await (await client.get(MODELS, headers=headers)).json())["data"]
                assert [card["id"] for card in cards] == names
                assert (await client.get(f"{MODELS}/v2", headers=headers)).status == 404

    async def test_is_limited_with_a_single_model_too(self, key_file: str) -> None:
        async with gateway_of_models({"small": [told]}, api_keys_file=key_file) as (client, _, _a):
            headers = {"authorization": "Bearer only-v1"}
            assert (await client.post(CHAT, json=prompt("small"), headers=headers)).status == 404
            assert (await (await client.get(MODELS, headers=headers)).json())["data"] == []


class TestAdapters:
    """LoRA adapters: `v1` has one by name and a folder, `v2` one by name, `small` none."""

    SETTINGS = MappingProxyType(
        {
            "v1": AdapterSettings("v1", {"sql": "/sql"}, "/all", group="v1"),
            "v2": AdapterSettings("v2", {"fr": "/fr"}, group="v2"),
        }
    )

    async def test_their_base_model_answers_and_gets_the_name(self) -> None:
        async with gateway_of_models(THREE, adapters=self.SETTINGS) as (client, clusters, _):
            clusters["v2"].added = {"added": "/added"}
            for name, base in {"sql": "v1", "v1:x": "v1", "fr": "v2", "added": "v2"}.items():
                answer = await (await client.post(CHAT, json=prompt(name))).json()
                assert answer == {"by": f"{base}-1"}
                assert json.loads(clusters[base].members[0].seen[-1][BODY])["model"] == name
            found = await error_of(await client.post(CHAT, json=prompt("v2:x")))
            assert found == (404, "model_not_found", "model")

    async def test_one_that_another_gateway_added_is_known_at_its_first_request(self) -> None:
        async with gateway_of_models(THREE, adapters=self.SETTINGS) as (client, clusters, _):
            for number in range(2):  # the second one just after a read
                assert (await client.post(CHAT, json=prompt("gone"))).status == 404
                clusters["v1"].added[f"new{number}"] = "/new"
                assert (await client.post(CHAT, json=prompt(f"new{number}"))).status == 200

    async def test_unknown_names_cost_one_read_a_second(self) -> None:
        async with gateway_of_models(THREE, adapters=self.SETTINGS) as (client, clusters, _):
            reads = Counter[str]()

            async def added(model: str) -> dict[str, str]:
                reads[model] += 1
                return {}

            for model, cluster in clusters.items():
                cluster.added_adapters = partial(added, model)  # type: ignore[method-assign]
            asked = [client.post(CHAT, json=prompt(f"gone{n}")) for n in range(40)]
            assert {one.status for one in await asyncio.gather(*asked)} == {404}
            assert set(reads) == {"v1", "v2"} and max(reads.values()) <= 3

    async def test_are_loaded_to_the_named_model_and_unloaded(self) -> None:
        async with gateway_of_models(THREE, adapters=self.SETTINGS) as (client, clusters, _):
            load, unload = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
            body = {"lora_name": "new", "lora_path": "/new"}
            unnamed = await error_of(await client.post(load, json=body))
            assert unnamed == (400, "invalid_value", "model")
            refused = {"large": 404, "small": 400, "v1": 200}
            for model, status in refused.items():
                assert (await client.post(load, json={**body, "model": model})).status == status
            assert clusters["v1"].added == {"new": "/new"} and not clusters["v2"].added
            assert (await client.post(CHAT, json=prompt("new"))).status == 200
            again = await client.post(load, json={**body, "model": "v2"})
            assert await error_of(again) == (400, "invalid_value", "lora_name")
            name = {"lora_name": "new"}
            assert (await client.post(unload, json={**name, "model": "v2"})).status == 404
            assert (await client.post(unload, json={**name, "model": "v1"})).status == 200
            assert (await client.post(CHAT, json=prompt("new"))).status == 404

    async def test_the_only_model_with_adapters_need_not_be_named(self) -> None:
        adapters = {"v1": self.SETTINGS["v1"]}
        async with gateway_of_models(THREE, adapters=adapters) as (client, clusters, _):
            body = {"lora_name": "new", "lora_path": "/new"}
            assert (await client.post("/v1/load_lora_adapter", json=body)).status == 200
            assert clusters["v1"].added == {"new": "/new"}

    async def test_are_listed_for_keys_that_may_use_their_model(self, tmp_path: Path) -> None:
        file = tmp_path / "keys.yaml"
        entries = [
            KeyEntry(name=model, hash=hash_of(model.encode()), tenant=model, models=[model])
            for model in ("v1", "fr")
        ]
        write_keys(file, KeyFile(keys=entries))
        models = {"small": [told], "v1": [], "v2": []}  # only `small` has a replica
        options = {"adapters": self.SETTINGS, "api_keys_file": str(file), "queue_timeout_s": 0.2}
        async with gateway_of_models(models, **options) as (client, clusters, _):
            clusters["v1"].added = {"added": "/added"}
            wanted = {"v1": [("v1", None), ("sql", "v1"), ("added", "v1")], "fr": [("fr", "v2")]}
            for key, names in wanted.items():
                headers = {"authorization": f"Bearer {key}"}
                cards = (await (await client.get(MODELS, headers=headers)).json())["data"]
                assert [(card["id"], card.get("parent")) for card in cards] == names
                posted = [client.post(CHAT, json=prompt(n), headers=headers) for n in ("sql", "fr")]
                statuses = [one.status for one in await asyncio.gather(*posted)]
                assert statuses == ([503, 404] if key == "v1" else [404, 503])


class TestFaults:
    """One model's trouble is none of the others'."""

    async def test_requests_of_a_model_that_hangs_take_no_place_of_another(self) -> None:
        models = {"hangs": [stall], "works": [told]}
        async with gateway_of_models(models, max_concurrent=2) as (client, clusters, _):
            stuck = [asyncio.create_task(client.post(CHAT, json=prompt("hangs"))) for _ in range(2)]
            await soon(lambda: len(clusters["hangs"].members[0].seen) == 2)
            assert (await client.post(CHAT, json=prompt("hangs"))).status == 429
            assert (await client.post(CHAT, json=prompt("works"))).status == 200
            for task in stuck:
                task.cancel()
            await asyncio.gather(*stuck, return_exceptions=True)

    async def test_a_model_whose_replica_dies_leaves_streams_of_another_alone(self) -> None:
        models = {"dies": [abort_connection], "works": [stream]}
        async with gateway_of_models(models, queue_timeout_s=0.5) as (client, _, _app):

            async def streamed() -> bytes:
                async with client.post(CHAT, json=prompt("works")) as response:
                    assert response.status == 200
                    return await response.read()

            whole = await streamed()
            streams = [asyncio.create_task(streamed()) for _ in range(4)]
            lost = [await client.post(CHAT, json=prompt("dies", str(n))) for n in range(3)]
            assert {each.status for each in lost} <= {502, 503}
            assert await asyncio.gather(*streams) == [whole] * 4

    async def test_a_model_without_a_replica_is_named_in_the_health(self) -> None:
        async with gateway_of_models({"up": [told], "down": []}) as (client, _, _app):
            health = await (await client.get("/health")).json()
            ready = {name: one["replicas_ready"] for name, one in health["models"].items()}
            assert (health["status"], ready) == ("ok", {"up": 1, "down": 0})

    async def test_the_health_is_good_while_a_request_can_start_a_replica(self) -> None:
        async with gateway_of_models({"a": [], "b": []}) as (client, clusters, _):
            assert (await client.get("/health")).status == 503
            clusters["b"].starts_on_demand = True
            response = await client.get("/health")
            health = await response.json()
            assert (response.status, health["status"]) == (200, "unavailable")

    async def test_requests_wake_the_replicas_of_their_model_only(self) -> None:
        models = {"asleep": [], "works": [told]}
        async with gateway_of_models(models, queue_timeout_s=0.3) as (client, _, app):
            assert (await client.post(CHAT, json=prompt("works"))).status == 200
            assert (app.is_wanted("works"), app.is_wanted("asleep")) == (True, False)
            assert (await client.post(CHAT, json=prompt("asleep"))).status == 503
            assert app.is_wanted("asleep")


class TestAdministration:
    async def test_a_change_is_for_all_models_or_for_the_named_one(self) -> None:
        async with gateway_of_models(THREE) as (client, clusters, _):

            def policies() -> list[str]:
                return [cluster.policy for cluster in clusters.values()]

            router = "/headrace/v1/router"
            response = await client.put(router, json={"policy": "local", "model": "v1"})
            assert (await response.json())["replicas"] == 1
            assert policies() == ["cost", "local", "cost"]
            assert (await client.put(router, json={"policy": "remote"})).status == 200
            assert policies() == ["remote"] * 3
            change = {"policy": "cost", "model": "large"}
            assert (await client.put(router, json=change)).status == 404
            change = {"mode": "off", "model": "v2"}
            assert (await client.put("/headrace/v1/speculation", json=change)).status == 200
            assert [cluster.told for cluster in clusters.values()] == [[], [], [{"mode": "off"}]]

    async def test_prompts_are_warmed_for_a_model(self) -> None:
        async with gateway_of_models(THREE, aliases=ALIASES) as (client, clusters, _):
            warm = {"prompts": ["Once"], "model": "gpt"}
            assert (await client.post("/headrace/v1/warm", json=warm)).status == 200
            assert [len(each.warmed) for each in clusters.values()] == [1, 0, 0]
            unnamed = await client.post("/headrace/v1/warm", json={"prompts": ["Once"]})
            assert (await error_of(unnamed))[1] == "missing_required_parameter"

    async def test_the_status_and_the_requests_know_the_model(self) -> None:
        async with gateway_of_models(THREE, aliases=ALIASES) as (client, _, _app):
            assert (await client.post(CHAT, json=prompt("gpt"))).status == 200
            status = await (await client.get("/headrace/v1/status")).json()
            assert set(status["gateway"]["models"]) == set(THREE)
            [request] = (await (await client.get("/headrace/v1/requests")).json())["finished"]
            assert request["model"] == "small"
            index = await (await client.get("/")).json()
            assert index["models"] == list(THREE)
