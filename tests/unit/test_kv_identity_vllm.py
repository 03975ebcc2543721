"""Engines over one store never load KV that other weights, settings or adapters computed.

vLLM's own scheduler with both sides of the connector; an engine's cache holds random bytes.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm.config import WeightTransferConfig
from vllm.lora.request import LoRARequest
from vllm.v1.core.sched.scheduler import Scheduler

from headrace_engine.connector.identity import adapters, engine_identity
from headrace_engine.connector.identity.weights import Unidentified
from tests.support.scheduled import BLOCK, Scheduled
from tests.support.tiny import tiny_llama

TOKENS = 5 * BLOCK + 10
Make = Callable[..., Scheduled]


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    # Files that were made a moment ago count as old.
    monkeypatch.setattr(adapters, "TIMESTAMP_S", -60.0)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Make]:
    """Starts engines over one store."""
    folder, made = tmp_path / "arena", []
    folder.mkdir()

    def start(**more: Any) -> Scheduled:
        made.append(Scheduled(folder, **more))
        return made[-1]

    yield start
    for each in made:
        each.close()


def cached(engine: Scheduled, name: str, **more: Any) -> int:
    """Serve a prompt; how many of its tokens came from caches. Then only the store has it."""
    engine.add(name, TOKENS, 2, **more)
    engine.until(lambda: not engine.scheduler.requests and not engine.connector.scheduler.busy)
    assert engine.scheduler.reset_prefix_cache()
    return TOKENS + 1 - sum(step.get(name, 0) for step in engine.steps)


HIT = 5 * BLOCK


class TestEngines:
    @pytest.mark.parametrize(
        "changed",
        [
            {"max_model_len": 2048},
            {"load_format": "dummy"},
            {"hf_overrides": {"rope_theta": 5e5}},
        ],
        ids=["max_model_len", "dummy weights", "overrides"],
    )
    def test_one_with_other_settings_finds_nothing(
        self, engine: Make, changed: dict[str, Any]
    ) -> None:
        assert cached(engine(), "a") == 0
        assert cached(engine(**changed), "b") == 0
        assert cached(engine(), "c") == HIT
        assert cached(engine(**changed), "d") == HIT

    def test_one_with_other_weights_finds_nothing(self, engine: Make, tmp_path: Path) -> None:
        model = Path(shutil.copytree(tiny_llama(), tmp_path / "model"))
        assert cached(engine(), "a") == 0
        assert cached(engine(model=str(model)), "b") == HIT
        with (model / "model.safetensors").open("r+b") as file:
            file.seek(-1, 2)
            file.write(b"\x55")
        assert cached(engine(model=str(model)), "c") == 0

    def test_one_without_an_identity_loads_and_saves_nothing_and_says_so_once(
        self, engine: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        assert cached(engine(), "a") == 0

        def unknown(config: Any) -> Any:
            raise Unidentified("load_format: nobody knows")

        with monkeypatch.context() as patched:
            patched.setattr(engine_identity, "kv_identity", unknown)
            with caplog.at_level(logging.WARNING):
                other = engine()
        assert [cached(other, name) for name in "bcd"] == [0, 0, 0]
        assert caplog.text.count("load_format: nobody knows") == 1
        assert other.connector.scheduler.counts == {}
        assert other.worker.get_kv_connector_stats() is None, "planners would look for its blocks"
        assert cached(engine(), "e") == HIT


class TestResets:
    """vLLM resets caches when weights are updated in place."""

    def test_kv_of_the_old_weights_is_not_found_again_and_others_find_theirs(
        self, engine: Make
    ) -> None:
        updated, other = engine(), engine()
        assert cached(updated, "a") == 0
        assert updated.scheduler.reset_prefix_cache(reset_connector=True)
        assert cached(updated, "b") == 0
        assert cached(updated, "c") == HIT, "its own is found"
        assert cached(other, "d") == HIT
        assert other.scheduler.reset_prefix_cache(reset_connector=True)
        assert cached(other, "e") == 0, "nobody says that both have the same weights"
        assert cached(engine(), "f") == HIT

    def test_running_requests_are_computed_again_and_saved_as_the_new_weights(
        self, engine: Make
    ) -> None:
        updated = engine()
        updated.add("a", TOKENS, 40)
        updated.step()
        assert updated.scheduler.reset_prefix_cache(True, reset_connector=True)
        asked = updated.scheduler.requests["a"]
        updated.until(
            lambda: not updated.scheduler.requests and not updated.connector.scheduler.busy
        )
        assert asked.num_preemptions == 1
        assert cached(engine(), "b") == 0
        assert updated.scheduler.reset_prefix_cache()
        assert cached(updated, "c") == HIT

    def test_where_the_engine_keeps_old_kv_nothing_is_saved_until_it_is_gone(
        self, engine: Make, caplog: pytest.LogCaptureFixture
    ) -> None:
        updated = engine()
        updated.add("a", TOKENS, 3)
        updated.step()
        assert not updated.scheduler.reset_prefix_cache(reset_connector=True)
        assert "still holds KV" in caplog.text
        updated.until(
            lambda: not updated.scheduler.requests and not updated.connector.scheduler.busy
        )
        assert updated.scheduler.reset_prefix_cache()
        assert [cached(updated, name) for name in "bc"] == [0, 0]
        assert updated.scheduler.reset_prefix_cache(reset_connector=True)
        assert [cached(updated, name) for name in "de"] == [0, HIT]

    def test_a_reset_is_told_to_planners(self, engine: Make) -> None:
        updated = engine()
        assert updated.connector.get_kv_connector_stats() is None
        assert updated.scheduler.reset_prefix_cache(reset_connector=True)
        [epoch] = updated.connector.get_kv_connector_stats().data["epochs"]
        assert len(epoch) == 32
        assert updated.connector.get_kv_connector_stats() is None

    def test_an_engine_whose_weights_may_be_exchanged_shares_none_from_the_start(
        self, engine: Make
    ) -> None:
        assert cached(engine(), "a") == 0
        trained = engine(weight_transfer_config=WeightTransferConfig())
        assert [cached(trained, name) for name in "bc"] == [0, HIT]
        assert cached(engine(), "d") == HIT


class TestAdapters:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        return self.write(tmp_path / "sql", b"version 1")

    @staticmethod
    def write(folder: Path, content: bytes) -> Path:
        folder.mkdir(exist_ok=True)
        (folder / "adapter_config.json").write_text('{"r": 8}')
        (folder / "adapter_model.safetensors").write_bytes(content)
        return folder

    @staticmethod
    def serve(engine: Scheduled, name: str, folder: Path, known: bool = True) -> int:
        """Serve a prompt with the adapter, once the engine knows it."""
        adapter = LoRARequest("sql", 1, str(folder))
        until = time.monotonic() + 20
        names = engine.connector._names
        asked: Any = type("Asked", (), {"lora_request": adapter})
        while known and not names.identified(asked) and time.monotonic() < until:
            time.sleep(0.01)
        return cached(engine, name, adapter=adapter)

    def test_another_adapter_under_its_name_finds_nothing(self, engine: Make, folder: Path) -> None:
        more = {"enable_lora": True, "scheduler": Scheduler}
        assert self.serve(engine(**more), "a", folder) == 0
        assert self.serve(engine(**more), "b", folder) == HIT
        self.write(folder, b"version 2")
        assert self.serve(engine(**more), "c", folder) == 0
        assert self.serve(engine(**more), "d", folder) == HIT
        self.write(folder, b"version 1")
        assert self.serve(engine(**more), "e", folder) == HIT

    def test_one_that_is_not_known_is_neither_loaded_nor_saved(
        self, engine: Make, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        first = engine(enable_lora=True)
        assert self.serve(first, "a", folder) == 0
        monkeypatch.setattr(adapters, "TIMESTAMP_S", 60.0)  # the files are new
        other = engine(enable_lora=True)
        assert [self.serve(other, name, folder, known=False) for name in "bc"] == [0, 0]
        assert other.connector.scheduler.counts == {}

    def test_the_models_own_kv_is_shared_by_engines_with_and_without_adapters(
        self, engine: Make
    ) -> None:
        assert cached(engine(), "a") == 0
        assert cached(engine(enable_lora=True), "b") == HIT

    def test_a_salt_that_equals_its_name_shares_no_block(self, engine: Make, folder: Path) -> None:
        """vLLM gives the first blocks of both the same hash."""
        one = engine(enable_lora=True)
        assert self.serve(one, "a", folder) == 0
        assert cached(one, "b", salt="sql") == 0
        assert cached(one, "c") == 0
        assert self.serve(one, "d", folder) == cached(one, "e", salt="sql") == HIT
