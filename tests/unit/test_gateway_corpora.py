"""`/headrace/v1/send_corpus_command`: corpora go to every replica, a version takes over behind its
last part."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.gateway_fakes import FakeCluster, answer, asked_from_elsewhere, gateway_over

PATH = "/headrace/v1/corpora"


class Memories(FakeCluster):
    """Replicas that answer by the command; `broken` are those that refuse."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        self.names, self.broken = names, set[str]()

    async def send_corpus_command(self, command: dict[str, Any]) -> list[dict[str, Any]]:
        self.told.append(command)
        good = {"part": {"tokens": 5}, "flip": {"tokens": 9}, "drop": {"dropped": True}}
        good["list"] = {"corpora": [], "stats": {}}
        said = good[command["do"]]
        return [
            {"replica_id": n, **({"error": "no room"} if n in self.broken else said)}
            for n in self.names
        ]


async def call(
    cluster: FakeCluster, method: str, path: str, body: Any = None
) -> tuple[int, dict[str, Any]]:
    async with (
        gateway_over(answer, backend=cluster) as bench,
        bench.client.request(method, path, json=body) as response,
    ):
        return response.status, await response.json()


async def test_a_whole_corpus_is_loaded_and_takes_over() -> None:
    cluster = Memories("b", "a")
    body = {"texts": ["one", "two"], "tenant": "t", "ttl_s": 60}
    status, said = await call(cluster, "PUT", PATH + "/hand.book-1", body)
    part, flip = cluster.told
    names = {"corpus": "hand.book-1", "tenant": "t", "version": part["version"]}
    more = {"part": 0, "texts": ["one", "two"], "ttl_s": 60, "total_chars": 0}
    assert part == {"do": "part", **names, **more}
    assert flip == {"do": "flip", **names, "teller": "a"}
    assert (status, said) == (
        200,
        {
            **names,
            "in_force": True,
            "replicas": [{"replica_id": "b", "tokens": 9}, {"replica_id": "a", "tokens": 9}],
        },
    )
    assert part["version"] > 1_700_000_000


async def test_parts_carry_the_version_and_only_the_last_one_flips() -> None:
    cluster = Memories("a")
    async with gateway_over(answer, backend=cluster) as bench:
        version = None
        for number, more in enumerate((True, True, False)):
            body = {"texts": ["x"], "part": number, "version": version, "more": more}
            async with bench.client.put(PATH + "/c", json=body) as response:
                said = await response.json()
            assert said["in_force"] is not more
            version = said["version"]
    assert [command["do"] for command in cluster.told] == ["part", "part", "part", "flip"]
    assert {command["version"] for command in cluster.told} == {version}


async def test_each_load_has_a_version_above_the_one_before() -> None:
    cluster = Memories("a")
    async with gateway_over(answer, backend=cluster) as bench:
        for _ in range(3):
            async with bench.client.put(PATH + "/c", json={"texts": ["x"]}) as response:
                assert response.status == 200
    versions = [command["version"] for command in cluster.told if command["do"] == "part"]
    assert versions == sorted(set(versions))


async def test_a_replica_that_failed_is_named_and_never_the_teller() -> None:
    cluster = Memories("a", "b")
    cluster.broken = {"a"}
    _, said = await call(cluster, "PUT", PATH + "/c", {"texts": ["x"]})
    assert cluster.told[1]["teller"] == "b"
    assert said["replicas"] == [
        {"replica_id": "a", "error": "no room"},
        {"replica_id": "b", "tokens": 9},
    ]


async def test_what_all_refuse_is_a_409_with_their_reason() -> None:
    cluster = Memories("a")
    cluster.broken = {"a"}
    status, said = await call(cluster, "PUT", PATH + "/c", {"texts": ["x"]})
    assert (status, said["error"]["code"], said["error"]["message"]) == (
        409,
        "memory_refuses",
        "No room.",
    )
    assert len(cluster.told) == 1


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [("GET", PATH, None), ("PUT", PATH + "/c", {"texts": ["x"]}), ("DELETE", PATH + "/c", None)],
)
async def test_without_a_memory_it_says_what_to_set(method: str, path: str, body: Any) -> None:
    status, said = await call(Memories(), method, path, body)
    assert (status, said["error"]["code"]) == (409, "no_memory")
    assert "set speculation.enabled: true" in said["error"]["message"]


async def test_a_corpus_is_dropped_for_the_tenant_that_the_query_names() -> None:
    cluster = Memories("a")
    status, said = await call(cluster, "DELETE", PATH + "/c?tenant=s%26t")
    assert (status, said["replicas"]) == (200, [{"replica_id": "a", "dropped": True}])
    assert (cluster.told[0]["do"], cluster.told[0]["tenant"]) == ("drop", "s&t")
    await call(cluster, "DELETE", PATH + "/c")
    assert cluster.told[1]["tenant"] is None
    await call(cluster, "DELETE", PATH + "/c?tenant=")
    assert cluster.told[2]["tenant"] == ""


async def test_what_nobody_has_cannot_be_dropped() -> None:
    class Empty(Memories):
        async def send_corpus_command(self, command: dict[str, Any]) -> list[dict[str, Any]]:
            return [{"replica_id": "a", "dropped": False}]

    status, said = await call(Empty(), "DELETE", PATH + "/c")
    assert (status, said["error"]["code"]) == (404, "corpus_not_found")


async def test_the_list_is_each_replicas() -> None:
    status, said = await call(Memories("a", "b"), "GET", PATH)
    assert status == 200
    assert [each["replica_id"] for each in said["replicas"]] == ["a", "b"]


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({}, "texts"),
        ({"texts": []}, "texts"),
        ({"texts": "x"}, "texts"),
        ({"texts": [""]}, "texts"),
        ({"texts": [1]}, "texts"),
        ({"texts": ["x"], "tenant": 1}, "tenant"),
        ({"texts": ["x"], "tenant": "t" * 257}, "tenant"),
        ({"texts": ["x"], "ttl_s": 0}, "ttl_s"),
        ({"texts": ["x"], "ttl_s": True}, "ttl_s"),
        ({"texts": ["x"], "version": 3}, "version"),
        ({"texts": ["x"], "part": 1}, "version"),
        ({"texts": ["x"], "part": -1, "version": 1}, "part"),
        ({"texts": ["x"], "more": 1}, "more"),
        ({"texts": ["x"], "total_chars": 1.5}, "total_chars"),
        ({"texts": ["x"], "text": "y"}, "text"),
    ],
)
async def test_a_wrong_field_is_a_400_that_names_it(wrong: dict[str, Any], field: str) -> None:
    cluster = Memories("a")
    status, said = await call(cluster, "PUT", PATH + "/c", wrong)
    assert (status, said["error"]["param"], cluster.told) == (400, field, [])


@pytest.mark.parametrize("name", ["-c", "a/b", "a b", "x" * 65, "ä"])
async def test_a_name_that_cannot_be_one_is_a_400(name: str) -> None:
    for method in ("PUT", "DELETE"):
        status, said = await call(Memories("a"), method, f"{PATH}/{name}", {"texts": ["x"]})
        assert (status, said["error"]["param"]) == (400, "corpus")


async def test_a_query_may_name_one_tenant_and_nothing_else() -> None:
    for query in ("tenant=a&tenant=b", "salt=a"):
        status, said = await call(Memories("a"), "DELETE", f"{PATH}/c?{query}")
        assert (status, said["error"]["param"]) == (400, "query")


async def test_other_methods_are_told_which_there_are() -> None:
    async with gateway_over(answer, backend=Memories("a")) as bench:
        for method, path, allow in (
            ("POST", PATH, "GET, HEAD"),
            ("GET", PATH + "/c", "PUT, DELETE"),
        ):
            async with bench.client.request(method, path) as response:
                assert (response.status, response.headers["allow"]) == (405, allow)


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE"])
async def test_only_the_gateways_own_machine_may_look_or_change(method: str) -> None:
    cluster = Memories("a")
    path = PATH if method == "GET" else PATH + "/c"
    begun = await asked_from_elsewhere(cluster, method, path, b'{"texts": ["x"]}')
    assert (begun["status"], cluster.told) == (403, [])
