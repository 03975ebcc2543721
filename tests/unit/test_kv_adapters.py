"""LoRA adapters are known by what their files hold, and only if the engine has loaded these."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.lora.request import LoRARequest

from headrace_engine.adapters.snapshots import snapshot_root
from headrace_engine.connector.identity import adapters
from headrace_engine.connector.identity.adapters import AdapterIdentities, BlockNames
from headrace_engine.connector.identity.engine_identity import adapter_settings
from tests.support.clock import Clock
from tests.support.engineconfig import engine_config
from tests.support.kvscheduling import hashes


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def folder_of(path: Path, content: bytes = b"weights") -> Path:
    path.mkdir(exist_ok=True, parents=True)
    (path / "adapter_config.json").write_text('{"r": 8}')
    (path / "adapter_model.safetensors").write_bytes(content)
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return folder_of(tmp_path / "sql")


def adapter(folder: Path, name: str = "sql", **more: Any) -> LoRARequest:
    return LoRARequest(name, 1, str(folder), **more)


class Engine:
    """One that starts now; its adapters are looked at when the test says so."""

    def __init__(self, settings: bytes = b"", started_s: float | None = None) -> None:
        self.clock = Clock()
        if started_s is None:  # all files that are there are old
            started_s = time.time() + adapters.TIMESTAMP_S
        self.known = AdapterIdentities(settings, started_s, self.clock)
        self.known._thread = SimpleNamespace()  # type: ignore[assignment]

    def of(self, asked: LoRARequest) -> bytes | None:
        if self.known.of(asked) is None:
            self.known.check()
        return self.known.of(asked)


class TestContent:
    def test_the_same_files_are_the_same_adapter_wherever_they_are(
        self, folder: Path, tmp_path: Path
    ) -> None:
        copy = shutil.copytree(folder, tmp_path / "node2" / "sql")
        assert Engine().of(adapter(folder)) == Engine().of(adapter(copy)) is not None

    @pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
    def test_other_files_under_the_same_name_are_another(self, folder: Path, name: str) -> None:
        before = Engine().of(adapter(folder))
        (folder / name).write_bytes(b"trained again")
        assert Engine().of(adapter(folder)) not in (None, before)

    def test_a_snapshot_is_known_by_its_path_at_once_and_after_the_start(self) -> None:
        known = AdapterIdentities(started_s=0.0)  # all files are newer
        one, other = (adapter(snapshot_root() / (digit * 32)) for digit in "01")
        assert None not in (known.of(one), known.of(other))
        assert known.of(one) == known.of(one) != known.of(other)
        assert known.of(adapter(Path(one.lora_path), name="sql2")) != known.of(one)
        assert AdapterIdentities(b"settings", 0.0).of(one) != known.of(one)
        assert known._thread is None, "nothing is read"

    def test_name_and_layout_and_settings_count(self, folder: Path) -> None:
        known = [
            Engine().of(adapter(folder)),
            Engine().of(adapter(folder, name="sql2")),
            Engine().of(adapter(folder, is_3d_lora_weight=True)),
            Engine(b"settings").of(adapter(folder)),
        ]
        assert None not in known and len(set(known)) == 4

    def test_settings_that_change_what_an_adapter_does_count_and_sizes_do_not(self) -> None:
        def told(**changed: Any) -> bytes:
            usual = {"lora_dtype": "auto", "max_loras": 1}
            from vllm.config import LoRAConfig

            return adapter_settings(engine_config(lora_config=LoRAConfig(**usual | changed)))

        assert told() == told(max_loras=4, max_cpu_loras=8, max_lora_rank=64)
        assert told(target_modules=["q_proj"]) != told() != told(lora_dtype="float16")

    @pytest.mark.parametrize("what", ["nowhere", "hub", "in place"])
    def test_what_cannot_be_seen_is_not_known(self, what: str, folder: Path) -> None:
        asked = {
            "nowhere": adapter(folder / "nothing"),
            "hub": LoRARequest("sql", 1, "org/none-such"),
            "in place": adapter(folder, load_inplace=True),
        }[what]
        assert Engine().of(asked) is None


class TestChanges:
    """The engine loads an adapter when it likes; only files that never changed are those."""

    def test_files_that_came_after_the_start_are_not_known(
        self, folder: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        engine = Engine(started_s=time.time() - 60)
        assert engine.of(adapter(folder)) is None
        for _ in range(3):
            engine.known.check()
        assert caplog.text.count("neither stored nor pulled") == 1

    @pytest.mark.parametrize("how", ["written", "moved", "renamed", "linked", "gone"])
    def test_files_that_change_under_a_running_engine_are_never_known_again(
        self, how: str, tmp_path: Path
    ) -> None:
        folder_of(tmp_path / "v1")
        other = folder_of(tmp_path / "v2", b"others")
        folder = tmp_path / "sql"
        (folder.symlink_to if how == "linked" else (tmp_path / "v1").rename)(
            "v1" if how == "linked" else folder
        )
        engine = Engine()
        before = engine.of(adapter(folder))
        assert before is not None
        time.sleep(0.02)
        if how == "written":
            (folder / "adapter_model.safetensors").write_bytes(b"others")
        elif how == "moved":
            (other / "adapter_model.safetensors").rename(folder / "adapter_model.safetensors")
        elif how == "renamed":
            folder.rename(tmp_path / "old")
            other.rename(folder)
        elif how == "linked":
            folder.unlink()
            folder.symlink_to("v2")
        else:
            shutil.rmtree(folder)
        engine.known.check()
        assert engine.known.of(adapter(folder)) is None
        if how == "written":
            (folder / "adapter_model.safetensors").write_bytes(b"weights")
            engine.known.check()
            assert engine.known.of(adapter(folder)) is None, "what it has loaded nobody knows"
            assert Engine().of(adapter(folder)) == before

    @pytest.mark.parametrize("how", ["renamed", "linked"])
    def test_so_are_those_that_were_exchanged_before_the_first_request(
        self, how: str, tmp_path: Path
    ) -> None:
        """The engine may have loaded what was there before."""
        other, folder = folder_of(tmp_path / "v2", b"others"), tmp_path / "sql"
        engine = Engine()
        if how == "renamed":
            other.rename(folder)
        else:
            folder.symlink_to("v2")
        engine.known._started_s -= adapters.TIMESTAMP_S
        assert engine.of(adapter(folder)) is None

    def test_the_same_content_written_again_stays_known(self, folder: Path) -> None:
        engine = Engine()
        before = engine.of(adapter(folder))
        time.sleep(0.02)
        folder_of(folder)
        os.utime(folder / "adapter_config.json")
        engine.known.check()
        assert engine.known.of(adapter(folder)) == before is not None

    def test_a_look_that_is_long_ago_counts_no_more(self, folder: Path) -> None:
        engine = Engine()
        assert engine.of(adapter(folder)) is not None
        engine.clock.now_s += adapters.OLD_S + 1
        assert engine.known.of(adapter(folder)) is None
        engine.known.check()
        assert engine.known.of(adapter(folder)) is not None

    def test_adapters_without_number_are_not_all_remembered(self, folder: Path) -> None:
        engine = Engine()
        for number in range(adapters.MAX_ADAPTERS + 10):
            engine.known.of(adapter(folder, name=f"a{number}"))
        assert len(engine.known._known) == adapters.MAX_ADAPTERS


def test_files_are_looked_at_in_a_thread_of_its_own(folder: Path) -> None:
    known = AdapterIdentities(started_s=time.time() + 60)
    assert known.of(adapter(folder)) is None
    until = time.monotonic() + 20
    while known.of(adapter(folder)) is None and time.monotonic() < until:
        time.sleep(0.01)
    assert known.of(adapter(folder)) is not None
    thread = known._thread
    known.close()
    assert thread is not None
    thread.join(5)
    assert not thread.is_alive()


class TestNames:
    """Under which names an engine's blocks are stored."""

    class Known:
        def of(self, adapter: Any) -> bytes | None:
            return {"one": b"1" * 16, "two": b"2" * 16}.get(adapter)

    def names(self, adapter: str | None = None, epoch: bytes = b"", **more: Any) -> Any:
        asked = SimpleNamespace(block_hashes=hashes(3), lora_request=adapter, **more)
        return BlockNames(self.Known(), epoch).of_request(asked, 0, None)  # type: ignore[arg-type]

    def test_a_plain_requests_blocks_have_vllms_names(self) -> None:
        assert self.names() == hashes(3)
        assert BlockNames().own([b"a"]) == [b"a"]

    def test_adapters_and_epochs_share_none(self) -> None:
        made = [
            self.names(adapter, epoch) for adapter in (None, "one", "two") for epoch in (b"", b"e")
        ]
        assert len({name for names in made for name in names}) == 3 * 6

    def test_an_unknown_adapters_blocks_have_none(self) -> None:
        assert self.names("three") is None
        asked = SimpleNamespace(block_hashes=hashes(3), lora_request="one")
        assert BlockNames().of_request(asked, 0, 3) is None

    def test_after_a_reset_all_names_are_new(self) -> None:
        names = BlockNames(self.Known())  # type: ignore[arg-type]
        asked = SimpleNamespace(block_hashes=hashes(3), lora_request=None)
        made = []
        for _ in range(3):
            made += [names.of_request(asked, 0, 3), [*names.own([b"a"])]]
            names.renew()
        assert len({name for each in made for name in each}) == 12
