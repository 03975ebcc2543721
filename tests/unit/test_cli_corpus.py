"""`headrace corpus` against a gateway that is real down to its replicas' memories."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.cli import client, corpus, state
from headrace.cli.main import main
from headrace.config.gateway import GatewaySettings
from headrace.gateway import build_gateway_app, serve_gateway
from headrace_decode.speculative.corpus_loader import CorpusLoader
from headrace_decode.speculative.retrieval.corpus_manager import CorpusManager
from headrace_decode.speculative.retrieval.draft_memory import DraftMemory, MemorySettings
from tests.unit.gateway_fakes import MODEL, FakeCluster


class Cluster(FakeCluster):
    """Two replicas whose tokens are letters; `corpora` as in the configuration."""

    def __init__(self, *, corpora: bool = True, replicas: int = 2) -> None:
        super().__init__()
        self.memories = [
            DraftMemory(MemorySettings(capacity_bytes=4 << 20, public_corpora=corpora))
            for _ in range(replicas)
        ]
        self.loaders = [_loader(CorpusManager(each)) for each in self.memories]

    async def send_corpus_command(self, command: dict[str, Any]) -> list[dict[str, Any]]:
        answers = []
        for number, loader in enumerate(self.loaders):
            answer = await loader.command(dict(command), f"replica-{number}")
            answers.append({"replica_id": f"replica-{number}", **(answer or {})})
        return answers


def _loader(corpora: CorpusManager) -> CorpusLoader:
    async def tell(command: dict[str, Any]) -> dict[str, Any] | None:
        return corpora.command(command)

    return CorpusLoader(lambda texts: [[ord(c) for c in text] for text in texts], tell)


class Endpoint:
    """A gateway in a thread of its own, and the instance that leads to it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.cluster = Cluster()
        self.instance = state.Instance(name="a", token="t", phase="ready")
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._server: Any = None
        monkeypatch.setattr(client, "running_instance", lambda name: self.instance)
        self.serve(self.cluster)

    def serve(self, cluster: Cluster) -> None:
        """Have another cluster behind it."""
        self.stop()
        self.cluster = cluster
        app = build_gateway_app(GatewaySettings(), cluster, MODEL)
        serving = asyncio.run_coroutine_threadsafe(serve_gateway(app, "127.0.0.1", 0), self._loop)
        self._server = serving.result(30)
        self.instance.endpoint = f"http://127.0.0.1:{self._server.port}"

    def stop(self) -> None:
        if self._server is not None:
            stopping = asyncio.run_coroutine_threadsafe(self._server.stop(grace_s=1), self._loop)
            stopping.result(30)

    def close(self) -> None:
        self.stop()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(30)
        self._loop.close()


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[Endpoint]:
    made = Endpoint(monkeypatch)
    yield made
    made.close()


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as caught:
        main(["corpus", *arguments])
    out, err = capsys.readouterr()
    code = caught.value.code
    return (code if isinstance(code, int) else 0 if code is None else 1), out, err


def corpora_of(memory: DraftMemory) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = CorpusManager(memory).command({"do": "list"})["corpora"]
    return found


def test_files_and_folders_become_one_corpus_at_every_replica(
    endpoint: Endpoint, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "docs" / "deep").mkdir(parents=True)
    (tmp_path / "docs" / ".git").mkdir()
    (tmp_path / "docs" / "a.txt").write_text("alpha")
    (tmp_path / "docs" / "deep" / "b.md").write_text("beta")
    (tmp_path / "docs" / ".git" / "c").write_text("hidden")
    (tmp_path / "docs" / "d.bin").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "docs" / "empty").write_text("")
    (tmp_path / "e.txt").write_text("gamma")
    code, out, err = run(
        capsys, "load", str(tmp_path / "docs"), str(tmp_path / "e.txt"), "--corpus", "c"
    )
    assert (code, out.split(":")[1]) == (0, " 14 tokens for all tenants, 2 replicas\n"), err
    assert f"warning: {tmp_path}/docs/d.bin is not UTF-8 text; it is skipped" in err
    for each in endpoint.cluster.memories:
        [found] = corpora_of(each)
        assert (found["corpus"], found["tokens"], found["segments"]) == ("c", 14, 3)


def test_a_long_file_goes_over_in_parts_and_says_how_far_it_is(
    endpoint: Endpoint,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(corpus, "PART_BYTES", 1000)
    lines = [f"line {number:06}\n" for number in range(400)]
    (tmp_path / "long").write_text("".join(lines))
    code, _, err = run(capsys, "load", str(tmp_path / "long"), "--corpus", "c")
    assert code == 0
    told = [line for line in err.splitlines() if line.startswith("loaded ")]
    assert len(told) >= 4
    assert told[-1] == "loaded 4.7 KiB of 4.7 KiB"
    [found] = corpora_of(endpoint.cluster.memories[0])
    assert found["tokens"] == 4800
    assert found["loading_tokens"] == 0


def test_what_is_loaded_again_replaces_what_was_there(
    endpoint: Endpoint, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for text in ("first", "second one"):
        (tmp_path / "a").write_text(text)
        options = ["--tenant", "salt", "--ttl", "3600"]
        code, out, _ = run(capsys, "load", str(tmp_path / "a"), "--corpus", "c", *options)
        assert code == 0
        assert "tokens for one tenant" in out
    [found] = corpora_of(endpoint.cluster.memories[1])
    assert (found["tokens"], found["tenant"]) == (10, "salt")
    assert found["expires_s"] is not None


def test_list_stats_and_drop(
    endpoint: Endpoint, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = run(capsys, "list")
    assert (code, out) == (0, "no corpus is loaded\n")
    (tmp_path / "a").write_text("some text")
    run(capsys, "load", str(tmp_path / "a"), "--corpus", "c")
    run(capsys, "load", str(tmp_path / "a"), "--corpus", "c", "--tenant", "salt")
    code, out, _ = run(capsys, "list")
    assert code == 0
    assert "all tenants" in out and "salt" in out
    _, out, _ = run(capsys, "list", "--json")
    assert [(each["tenant"], each["replicas"]) for each in json.loads(out)] == [
        (None, 2),
        ("salt", 2),
    ]
    _, out, _ = run(capsys, "stats", "--json")
    assert [each["stats"]["segments"] for each in json.loads(out)] == [2, 2]
    code, out, _ = run(capsys, "stats")
    assert code == 0 and "4.0 MiB" in out
    code, out, _ = run(capsys, "remove", "c")
    assert (code, out) == (0, '"c" is removed\n')
    code, _, err = run(capsys, "remove", "c")
    assert (code, err) == (1, "error: There is no corpus 'c' for all tenants.\n")
    code, out, _ = run(capsys, "remove", "c", "--tenant", "salt")
    assert code == 0
    assert run(capsys, "list")[1] == "no corpus is loaded\n"


def test_what_is_switched_off_is_one_line_that_names_the_switch(
    endpoint: Endpoint, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a").write_text("some text")
    load = ["load", str(tmp_path / "a"), "--corpus", "c"]
    endpoint.serve(Cluster(corpora=False))
    code, _, err = run(capsys, *load)
    assert (code, err) == (
        1,
        "error: Corpus 'c' would be for all tenants, but speculation.corpora is false: set it to "
        "true, or name one tenant.\n",
    )
    endpoint.serve(Cluster(replicas=0))
    for command in (load, ["list"], ["stats"], ["remove", "c"]):
        code, _, err = run(capsys, *command)
        assert (code, err) == (
            1,
            "error: No replica drafts from a memory: set speculation.enabled: true.\n",
        )


def test_what_cannot_be_read_is_exit_2_before_anything_is_sent(
    endpoint: Endpoint, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bin").write_bytes(b"\xff")
    (tmp_path / "empty").write_text("")
    for path, says in (
        ("none", "is neither a file nor a folder"),
        ("bin", "is not UTF-8 text"),
        ("empty", "there is no text in these files"),
    ):
        code, _, err = run(capsys, "load", str(tmp_path / path), "--corpus", "c")
        assert code == 2
        assert err.count("\n") == 1 and says in err
    assert corpora_of(endpoint.cluster.memories[0]) == []
