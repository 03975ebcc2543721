"""LoRA adapters of a replica: which content a name has, replacement, and what is loaded."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace_engine.adapters.loaded import PRIOR_LOAD_S, LoadedAdapters
from headrace_engine.adapters.middleware import AdapterMiddleware, with_adapters
from headrace_engine.adapters.registry import (
    CHECK_S,
    LIST_S,
    LOCAL_S,
    AdapterRegistry,
    AdapterVersion,
)
from headrace_engine.adapters.settings import AdapterRef, AdapterSettings
from headrace_engine.adapters.snapshots import (
    Snapshots,
)
from headrace_engine.adapters.sources import (
    CONFIG,
    WEIGHTS,
    AdapterError,
    AdapterUnreachableError,
)
from headrace_engine.serving.added_adapters import AddedAdapters
from tests.support.adapter_files import write_adapter


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Engine:
    """An engine that loads anything, in one second."""

    def __init__(self, clock: Clock, capacity: int = 2) -> None:
        self.capacity, self._clock = capacity, clock
        self.loads: list[str] = []
        self.offered: dict[str, AdapterVersion] = {}
        self.refuses: str | None = None

    async def load(self, version: AdapterVersion) -> None:
        if self.refuses is not None:
            raise AdapterError(self.refuses)
        self.loads.append(version.name)
        self._clock.now_s += 1.0

    def offer(self, version: AdapterVersion) -> None:
        self.offered[version.name] = version

    def withdraw(self, name: str) -> None:
        self.offered.pop(name, None)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def engine(clock: Clock) -> Engine:
    return Engine(clock)


@pytest.fixture
def make(tmp_path: Path, clock: Clock, engine: Engine) -> Callable[..., AdapterRegistry]:
    def made(**settings: Any) -> AdapterRegistry:
        snapshots = Snapshots(tmp_path / "snapshots")
        return AdapterRegistry(AdapterSettings("base", **settings), engine, snapshots, clock)

    return made


async def use(registry: AdapterRegistry, name: str, **how: Any) -> AdapterVersion:
    version = await registry.find(name, **how)
    assert version is not None
    async with registry.using(version.number):
        return version


class TestLoaded:
    def test_the_least_recently_used_adapter_goes_first(self) -> None:
        loaded = LoadedAdapters(2)
        for number in (1, 2):
            loaded.add(number, f"digest {number}", 1.0)
        assert loaded.use(1)
        loaded.add(3, "digest 3", 1.0)
        assert not loaded.use(2) and loaded.digests == ("digest 1", "digest 3")

    def test_the_load_time_is_learned(self) -> None:
        loaded = LoadedAdapters(2)
        assert loaded.load_s == PRIOR_LOAD_S
        loaded.add(1, "a", 2.0)
        assert loaded.load_s == 2.0
        loaded.add(2, "b", 3.0)
        assert 2.0 < loaded.load_s < 3.0


class TestRegistry:
    def test_an_adapter_is_loaded_once(
        self, make: Callable[..., AdapterRegistry], engine: Engine, tmp_path: Path
    ) -> None:
        registry = make(sources={"sql": str(write_adapter(tmp_path / "a"))})

        async def scenario() -> None:
            first, second = await asyncio.gather(use(registry, "sql"), use(registry, "sql"))
            assert first == second and engine.offered == {"sql": first}

        asyncio.run(scenario())
        assert engine.loads == ["sql"]
        assert registry.report_fields()["adapter_load_s"] == 1.0

    def test_a_replaced_adapter_gets_a_new_number_and_path(
        self, make: Callable[..., AdapterRegistry], clock: Clock, engine: Engine, tmp_path: Path
    ) -> None:
        folder = write_adapter(tmp_path / "a")
        registry = make(sources={"sql": str(folder)})

        async def scenario() -> None:
            before = await use(registry, "sql")
            write_adapter(folder, b"other weights")
            assert await use(registry, "sql") == before
            clock.now_s += CHECK_S
            after = await use(registry, "sql")
            assert after.number != before.number and after.path != before.path
            assert engine.offered["sql"] == after
            async with registry.using(before.number):  # a request that began before
                assert (Path(before.path) / WEIGHTS).read_bytes() == b"weights"

        asyncio.run(scenario())

    def test_an_administrator_sees_a_replacement_at_once(
        self, make: Callable[..., AdapterRegistry], tmp_path: Path
    ) -> None:
        folder = write_adapter(tmp_path / "a")
        registry = make()
        registry.set_added({"sql": str(folder)})

        async def scenario() -> None:
            before = await use(registry, "sql")
            write_adapter(folder, b"other weights")
            assert (await use(registry, "sql", now=True)).digest != before.digest

        asyncio.run(scenario())

    def test_unknown_names_cost_no_look_at_the_store(
        self, make: Callable[..., AdapterRegistry], clock: Clock, tmp_path: Path
    ) -> None:
        write_adapter(tmp_path / "all" / "sql")
        registry = make(loading_path=str(tmp_path / "all"))

        async def scenario() -> None:
            assert (await use(registry, "base:sql")).name == "base:sql"
            shutil.rmtree(tmp_path / "all")  # a look would fail from here on
            for name in ("base:none", "other:sql", "sql", "base:", "base:../sql"):
                assert await registry.find(name) is None
            assert await registry.names() == ["base:sql"]
            clock.now_s += LIST_S
            assert await registry.names() == ["base:sql"]  # kept: the folder is not readable

        asyncio.run(scenario())

    def test_an_adapter_whose_source_is_gone_for_now_stays(
        self, make: Callable[..., AdapterRegistry], clock: Clock, tmp_path: Path
    ) -> None:
        folder = write_adapter(tmp_path / "a")
        registry = make(sources={"sql": str(folder)})

        async def scenario() -> None:
            before = await use(registry, "sql")
            folder.rename(tmp_path / "away")
            clock.now_s += CHECK_S
            assert await use(registry, "sql") == before

        asyncio.run(scenario())

    def test_an_adapter_that_cannot_be_used_says_why(
        self, make: Callable[..., AdapterRegistry], engine: Engine, tmp_path: Path
    ) -> None:
        (tmp_path / "empty").mkdir()
        sources = {"sql": str(write_adapter(tmp_path / "a")), "empty": str(tmp_path / "empty")}
        registry = make(sources=sources)
        engine.refuses = "rank 64 is above max_lora_rank 16"

        async def scenario() -> None:
            with pytest.raises(AdapterError, match="rank 64"):
                await use(registry, "sql")
            with pytest.raises(AdapterError, match=f"has no {CONFIG}"):
                await registry.find("empty")

        asyncio.run(scenario())
        assert registry.loaded.digests == ()

    def test_a_removed_adapter_is_withdrawn(
        self, make: Callable[..., AdapterRegistry], engine: Engine, tmp_path: Path
    ) -> None:
        registry = make()
        registry.set_added({"sql": str(write_adapter(tmp_path / "a"))})

        async def scenario() -> None:
            await use(registry, "sql")
            registry.set_added({})
            assert await registry.find("sql") is None and not engine.offered

        asyncio.run(scenario())

    def test_the_configuration_keeps_its_names(
        self, make: Callable[..., AdapterRegistry], tmp_path: Path
    ) -> None:
        registry = make(sources={"sql": "/a"})
        assert registry.why_not_added("sql") and registry.why_not_added("base")
        assert registry.why_not_added("other") is None

    def test_another_replica_gets_exactly_the_content(
        self, make: Callable[..., AdapterRegistry], tmp_path: Path, clock: Clock
    ) -> None:
        folder = write_adapter(tmp_path / "a")
        registry = make(sources={"sql": str(folder)})
        other = AdapterRegistry(
            AdapterSettings("base"), Engine(clock), Snapshots(tmp_path / "elsewhere"), clock
        )

        async def scenario() -> None:
            version = await use(registry, "sql")
            ref = registry.ref_of(version.number)
            assert ref == AdapterRef("sql", version.digest, str(folder))
            assert (await other.find_ref(ref)).digest == version.digest
            write_adapter(folder, b"replaced")
            assert (await other.find_ref(ref)).digest == version.digest  # it has a snapshot
            third = AdapterRegistry(
                AdapterSettings("base"), Engine(clock), Snapshots(tmp_path / "third"), clock
            )
            with pytest.raises(AdapterError, match="other content"):
                await third.find_ref(ref)

        asyncio.run(scenario())
        assert registry.ref_of(17) is None
        assert registry.version("sql", "0" * 32) is None

    def test_an_adapter_that_a_prefill_replica_cannot_use_is_prefilled_here_for_a_minute(
        self, make: Callable[..., AdapterRegistry], clock: Clock
    ) -> None:
        registry = make()
        registry.record_remote_failure("a")
        assert registry.why_local("a") and registry.why_local("b") is None
        clock.now_s += LOCAL_S
        assert registry.why_local("a") is None

    def test_replaced_contents_are_dropped_unless_a_request_uses_them(
        self,
        make: Callable[..., AdapterRegistry],
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        from headrace_engine.adapters import registry as module

        monkeypatch.setattr(module, "MAX_VERSIONS", 2)
        folder = write_adapter(tmp_path / "a", b"0")
        registry = make(sources={"sql": str(folder)})

        async def scenario() -> None:
            first = await use(registry, "sql")
            async with registry.using(first.number):
                for number in range(1, 4):
                    write_adapter(folder, b"%d" % number * (number + 1))
                    await use(registry, "sql", now=True)
                assert registry.ref_of(first.number) is not None
                assert len(registry._snapshots._locks) == 2
            write_adapter(folder, b"the last")
            await use(registry, "sql", now=True)
            assert registry.ref_of(first.number) is None

        asyncio.run(scenario())

    def test_a_source_that_hangs_ends_at_the_time_limit(
        self, make: Callable[..., AdapterRegistry], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        import threading

        from headrace_engine.adapters import registry as module

        go = threading.Event()

        def hang(source: str) -> Any:
            go.wait()
            raise AdapterError("late")

        monkeypatch.setattr(module, "file_facts", hang)
        registry = make(sources={"sql": "/a"}, fetch_timeout_s=0.05)

        async def scenario() -> None:
            with pytest.raises(AdapterUnreachableError, match=r"not read after 0\.05 s"):
                await registry.find("sql")
            go.set()

        asyncio.run(scenario())


def test_added_adapters_are_kept_with_the_cluster() -> None:
    values: dict[str, bytes] = {}
    added = AddedAdapters("app", values.get, values.__setitem__)
    assert added.all() == {}
    assert added.set("sql", "/a") == {"sql": "/a"} == added.all()
    assert added.set("sql", None) == {} == added.all()
    values[next(iter(values))] = b"no json"
    assert added.all() == {}


def test_each_model_of_an_app_has_its_own_added_adapters() -> None:
    values: dict[str, bytes] = {}
    a, b = (AddedAdapters("app", values.get, values.__setitem__, group) for group in "ab")
    a.set("sql", "/a")
    assert (a.all(), b.all()) == ({"sql": "/a"}, {})


class App:
    """vLLM's application, as far as the middleware sees it."""

    def __init__(self, answer: bytes = b"{}") -> None:
        self.answer, self.bodies = answer, list[bytes]()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.bodies.append((await receive())["body"])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": self.answer})


async def ask(
    app: Any, body: bytes, method: str = "POST", path: str = "/v1/completions"
) -> tuple[int, Any]:
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    await app({"type": "http", "method": method, "path": path, "headers": []}, receive, send)
    whole = b"".join(message.get("body", b"") for message in sent)
    return sent[0]["status"], json.loads(whole)


class TestMiddleware:
    def test_a_request_that_names_an_adapter_finds_it_registered(
        self, make: Callable[..., AdapterRegistry], engine: Engine, tmp_path: Path
    ) -> None:
        app = App()
        registry = make(sources={"sql": str(write_adapter(tmp_path / "a"))})
        middleware = AdapterMiddleware(app, registry)
        body = b'{"model": "sql", "prompt": "a"}'
        assert asyncio.run(ask(middleware, body))[0] == 200
        assert app.bodies == [body] and list(engine.offered) == ["sql"] and not engine.loads

    @pytest.mark.parametrize("body", [b'{"model": "base"}', b'{"model": "x"}', b"[]", b"{", b""])
    def test_other_requests_pass_unchanged(
        self, make: Callable[..., AdapterRegistry], body: bytes
    ) -> None:
        app = App()
        assert asyncio.run(ask(AdapterMiddleware(app, make()), body))[0] == 200
        assert app.bodies == [body]

    def test_an_adapter_that_cannot_be_used_is_refused(
        self, make: Callable[..., AdapterRegistry], tmp_path: Path
    ) -> None:
        (tmp_path / "empty").mkdir()
        registry = make(sources={"empty": str(tmp_path / "empty"), "away": "/none/such"})
        app = App()
        middleware = AdapterMiddleware(app, registry)
        for name, status, code in (
            ("empty", 400, "adapter_invalid"),
            ("away", 503, "adapter_unreachable"),
        ):
            found, answer = asyncio.run(ask(middleware, json.dumps({"model": name}).encode()))
            assert (found, answer["error"]["code"]) == (status, code)
            assert answer["error"]["param"] == "model"
        assert not app.bodies

    def test_the_list_of_models_has_each_adapter_once_and_no_paths(
        self, make: Callable[..., AdapterRegistry], tmp_path: Path
    ) -> None:
        card = {"id": "base", "object": "model", "created": 1, "owned_by": "vllm", "root": "/m"}
        loaded = {**card, "id": "sql", "parent": "base", "root": "/cache/0123"}
        listing = json.dumps({"object": "list", "data": [card, loaded]}).encode()
        registry = make(sources={"sql": str(write_adapter(tmp_path / "a")), "fr": "/b"})
        middleware = AdapterMiddleware(App(listing), registry)
        _, answer = asyncio.run(ask(middleware, b"", "GET", "/v1/models"))
        assert [(each["id"], each.get("parent")) for each in answer["data"]] == [
            ("base", None),
            ("sql", "base"),
            ("fr", "base"),
        ]
        assert [each["root"] for each in answer["data"]] == ["/m", "sql", "fr"]
        assert json.loads(with_adapters(listing, []))["data"] == [card]
