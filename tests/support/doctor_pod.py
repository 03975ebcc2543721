"""A pod that `headrace doctor --cluster` looks at: its findings, a server that it asks, a model."""

from __future__ import annotations

import json
import os
import struct
import threading
from collections.abc import Iterator
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from time import time

import pytest

from headrace.cli.doctor import Finding, finding, pod
from headrace.config import load_config

GIB = 2**30
HERE = "127.0.0.1"


def look(
    name: str,
    *settings: str,
    role: str = "decode",
    env: dict[str, str] | None = None,
    **more: object,
) -> list[Finding]:
    """What one check finds in a pod of that role."""
    this = pod.Pod(role, load_config(overrides=list(settings)), **more)  # type: ignore[arg-type]
    chosen = [c for c in pod.checks(this, os.environ if env is None else env) if c[0] == name]
    assert chosen, f"no check called {name}"
    return finding.run(chosen)


def stops(found: list[Finding], seen: str, remedy: str) -> None:
    """Exactly one of the findings is FAIL; it says what is wrong and what helps."""
    failed = [f for f in found if f.level == "FAIL"]
    assert len(failed) == 1, found
    assert seen in failed[0].found, failed
    assert remedy in failed[0].remedy, failed


class Answer(BaseHTTPRequestHandler):
    """The answer of a server: a status, a body, and the seconds by which its clock is wrong."""

    status, skew_s, body = 200, 0.0, b""

    def do_GET(self) -> None:
        self.send_response_only(self.status)
        self.send_header("Date", formatdate(time() + self.skew_s, usegmt=True))
        self.send_header("Content-Length", str(len(self.body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(self.body)

    do_HEAD = do_GET

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[tuple[str, type[Answer]]]:
    """(its address, its answers)."""
    answers = type("Own", (Answer,), {})
    with ThreadingHTTPServer((HERE, 0), answers) as running:
        thread = threading.Thread(target=running.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        yield f"http://{HERE}:{running.server_address[1]}", answers
        running.shutdown()
        thread.join()


def safetensors(data: int = 64) -> bytes:
    header = json.dumps({"w": {"dtype": "U8", "shape": [data], "data_offsets": [0, data]}}).encode()
    return struct.pack("<Q", len(header)) + header + bytes(data)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A whole model of two shards."""
    folder = tmp_path / "model"
    folder.mkdir()
    shape = {"num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 2}
    shape |= {"hidden_size": 64, "max_position_embeddings": 128, "dtype": "bfloat16"}  # type: ignore[dict-item]
    (folder / "config.json").write_text(json.dumps(shape))
    shards = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    index = {"weight_map": {"a": shards[0], "b": shards[1]}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    for shard in shards:
        (folder / shard).write_bytes(safetensors())
    return folder
