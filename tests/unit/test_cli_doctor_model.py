"""Faults of a model, planted in a pod: each is found by `headrace doctor --cluster`, stops the pod,
and its remedy is named."""

from __future__ import annotations

import json
import shutil
import socket
from pathlib import Path

import pytest

from headrace.cli.doctor import Finding
from tests.support import doctor_pod
from tests.support.doctor_pod import HERE, Answer, look, safetensors, stops

model, server = doctor_pod.model, doctor_pod.server


def test_a_whole_model_is_fine(model: Path) -> None:
    (found,) = look("model", f"model.source={model}")
    assert found.level == "OK"


def test_a_missing_shard(model: Path) -> None:
    (model / "model-00002-of-00002.safetensors").unlink()
    found = look("model", f"model.source={model}")
    stops(found, "model-00002-of-00002.safetensors is missing", "warm-up job")


def test_a_torn_shard(model: Path) -> None:
    (model / "model-00001-of-00002.safetensors").write_bytes(safetensors()[:-9])
    stops(look("model", f"model.source={model}"), "bytes, not", "download")


def test_a_pointer_in_place_of_weights(model: Path) -> None:
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 99\n"
    (model / "model-00001-of-00002.safetensors").write_bytes(pointer)
    stops(look("model", f"model.source={model}"), "Git LFS pointer", "download")


def test_a_folder_that_is_not_mounted(tmp_path: Path) -> None:
    found = look("model", f"model.source={tmp_path}/absent")
    stops(found, "config.json is missing", "mount it in this init container")


def hub(server: tuple[str, type[Answer]], tmp_path: Path, **env: str) -> list[Finding]:
    home = {"HF_ENDPOINT": server[0], "HF_HOME": str(tmp_path), "HOME": str(tmp_path)}
    return look("model", "model.source=org/name", env=home | env)


@pytest.mark.parametrize("status", [401, 403])
def test_a_gated_model_without_a_token(
    server: tuple[str, type[Answer]], tmp_path: Path, status: int
) -> None:
    server[1].status = status
    stops(hub(server, tmp_path), "no token is set", "HF_TOKEN")


def test_a_gated_model_with_a_token_that_may_not(
    server: tuple[str, type[Answer]], tmp_path: Path
) -> None:
    server[1].status = 403
    stops(hub(server, tmp_path, HF_TOKEN="hf_x"), "the token has no access", "terms")


def test_a_model_that_the_hub_has(server: tuple[str, type[Answer]], tmp_path: Path) -> None:
    assert [f.level for f in hub(server, tmp_path)] == ["OK"]


@pytest.mark.parametrize(
    ("room", "level"), [("", "OK"), ("1000000", "OK"), ("300001", "OK"), ("299999", "FAIL")]
)
def test_a_model_larger_than_its_volume(
    server: tuple[str, type[Answer]], tmp_path: Path, room: str, level: str
) -> None:
    """The kubelet evicts a pod whose volume grows beyond its limit, again and again. Copies in
    other formats are not downloaded."""
    sizes = {
        "a.safetensors": 100_000,
        "b.safetensors": 200_000,
        "d.bin": 7,
        "copy/c.bin": 9_000_000,
    }
    files = [{"rfilename": name, "size": size} for name, size in sizes.items()]
    server[1].body = json.dumps({"siblings": files}).encode()
    found = hub(server, tmp_path, HEADRACE_MODEL_ROOM_BYTES=room)
    assert [each.level for each in found] == [level]
    if level == "FAIL":
        stops(found, "has 293.0 KiB of weights", "modelCache.size")


def test_a_hub_that_does_not_tell_sizes(server: tuple[str, type[Answer]], tmp_path: Path) -> None:
    server[1].body = b"<html>"
    found = hub(server, tmp_path, HEADRACE_MODEL_ROOM_BYTES="1")
    assert [each.level for each in found] == ["OK"]


def test_a_hub_out_of_reach(tmp_path: Path) -> None:
    with socket.create_server((HERE, 0)) as taken:
        port = taken.getsockname()[1]
    found = hub((f"http://{HERE}:{port}", Answer), tmp_path)
    stops(found, "the hub does not answer", "NetworkPolicy")


def test_offline_without_the_model_in_the_cache(tmp_path: Path) -> None:
    found = hub(("http://unused", Answer), tmp_path, HF_HUB_OFFLINE="1")
    stops(found, "HF_HUB_OFFLINE is set", "warm-up job")


def test_offline_with_the_model_in_the_cache(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "hub" / "models--org--name"
    (root / "refs").mkdir(parents=True)
    (root / "refs" / "main").write_text("abc")
    shutil.copytree(model, root / "snapshots" / "abc")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    found = hub(("http://unused", Answer), tmp_path, HF_HUB_OFFLINE="1")
    assert [f.level for f in found] == ["OK"], found
