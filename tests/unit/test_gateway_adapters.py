"""`/v1/load_lora_adapter` and `/v1/unload_lora_adapter` reach all replicas, for administrators."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.unit.gateway_fakes import FakeCluster, answer, asked_from_elsewhere, gateway_over

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
SQL = {"lora_name": "sql", "lora_path": "/adapters/sql"}


class Replicas(FakeCluster):
    """Replicas that load adapters; `broken` are those that cannot."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        self.names, self.broken = names, set[str]()
        self.sources: dict[str, str] = {}

    async def added_adapters(self) -> dict[str, str]:
        return self.sources

    async def set_adapter(self, name: str, source: str | None) -> list[dict[str, Any]]:
        self.sources.pop(name, None)
        if source is not None:
            self.sources[name] = source
        broken = self.broken if source is not None else ()
        return [
            {"replica_id": n, **({"error": "rank 64 is too large"} if n in broken else {})}
            for n in self.names
        ]


async def call(
    cluster: FakeCluster, path: str, body: Any, *, method: str = "POST"
) -> tuple[int, dict[str, Any]]:
    async with (
        gateway_over(answer, backend=cluster, has_adapters=True) as bench,
        bench.client.request(method, path, json=body) as response,
    ):
        return response.status, await response.json()


async def test_an_adapter_is_loaded_everywhere_and_kept() -> None:
    cluster = Replicas("d1", "p1")
    status, said = await call(cluster, LOAD, SQL)
    assert (status, said["lora_name"]) == (200, "sql")
    assert said["replicas"] == [{"replica_id": "d1"}, {"replica_id": "p1"}]
    assert cluster.sources == {"sql": "/adapters/sql"}


async def test_a_loaded_name_is_only_replaced_if_the_request_says_so() -> None:
    cluster = Replicas("d1")
    cluster.sources = {"sql": "/old"}
    status, said = await call(cluster, LOAD, SQL)
    assert (status, said["error"]["param"]) == (400, "lora_name")
    assert cluster.sources == {"sql": "/old"}
    assert (await call(cluster, LOAD, {**SQL, "load_inplace": True}))[0] == 200
    assert cluster.sources == {"sql": "/adapters/sql"}


async def test_an_adapter_that_no_replica_can_use_is_not_kept() -> None:
    cluster = Replicas("d1", "p1")
    cluster.broken = {"d1", "p1"}
    cluster.sources = {"sql": "/old"}
    status, said = await call(cluster, LOAD, {**SQL, "load_inplace": True})
    assert (status, said["error"]["param"]) == (400, "lora_path")
    assert "rank 64" in said["error"]["message"]
    assert cluster.sources == {"sql": "/old"}


async def test_a_replica_that_failed_is_named() -> None:
    cluster = Replicas("d1", "p1")
    cluster.broken = {"p1"}
    status, said = await call(cluster, LOAD, SQL)
    assert (status, said["error"]["code"]) == (503, "adapter_incomplete")
    assert "1 of 2" in said["error"]["message"] and "p1: rank 64" in said["error"]["message"]
    assert cluster.sources == {"sql": "/adapters/sql"}, "the others have it"


async def test_an_adapter_is_unloaded_everywhere() -> None:
    cluster = Replicas("d1")
    cluster.sources = {"sql": "/a"}
    assert (await call(cluster, UNLOAD, {"lora_name": "sql"}))[0] == 200
    assert cluster.sources == {}
    status, said = await call(cluster, UNLOAD, {"lora_name": "sql"})
    assert (status, said["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({**SQL, "lora_name": "a\nb"}, "lora_name"),
        ({**SQL, "lora_name": "x" * 129}, "lora_name"),
        ({"lora_name": "sql"}, "lora_path"),
        ({**SQL, "more": 1}, "more"),
    ],
)
async def test_a_wrong_field_is_named(body: dict[str, Any], param: str) -> None:
    status, said = await call(Replicas("d1"), LOAD, body)
    assert (status, said["error"]["param"]) == (400, param)


async def test_only_administrators_may_and_only_by_post() -> None:
    cluster = Replicas("d1")
    body = json.dumps(SQL).encode()
    start = await asked_from_elsewhere(cluster, "POST", LOAD, body, has_adapters=True)
    assert start["status"] == 403
    assert (await call(cluster, LOAD, SQL, method="PUT"))[0] == 405
    assert not cluster.sources


async def test_an_app_without_adapters_has_no_such_routes() -> None:
    for path in (LOAD, UNLOAD):
        async with gateway_over(answer) as bench, bench.client.post(path, json=SQL) as response:
            assert response.status == 404


async def test_the_schema_and_the_index_have_the_routes_where_there_are_adapters() -> None:
    for has_adapters in (True, False):
        async with gateway_over(answer, has_adapters=has_adapters) as bench:
            async with bench.client.get("/") as response:
                index = (await response.json())["endpoints"]
            async with bench.client.get("/openapi.json") as response:
                paths = (await response.json())["paths"]
        for path in (LOAD, UNLOAD):
            assert (path in index, path in paths) == (has_adapters, has_adapters)
