"""Commands about an app that runs elsewhere: `HEADRACE_URL` names it."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from headrace.cli import client
from headrace.cli.console import CliError
from headrace.cli.main import main

ANSWERS = {
    "/": {"name": "headrace", "model": "smollm2"},
    "/headrace/v1/status": {"replicas": [], "plans": {}, "nixl_bytes": 0},
    "/headrace/v1/history": {"last": {}},
    "/headrace/v1/plans/cmpl-1": {"request_id": "cmpl-1"},
    "/headrace/v1/corpora": {"replicas": []},
    "/headrace/v1/corpora/docs": {"replicas": [{"replica_id": "r1", "tokens": 3}], "version": 7},
    "/other/": {"name": "nginx"},
}


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """An app's endpoint that asks for the key `secret-key`."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            known = self.headers["authorization"] == "Bearer secret-key"
            self.send_response(200 if known and self.path in ANSWERS else 401)
            self.end_headers()
            self.wfile.write(json.dumps(ANSWERS.get(self.path, {})).encode())

        def do_PUT(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.do_GET()

        do_DELETE = do_GET

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_address[1]}"
    monkeypatch.setenv("HEADRACE_API_KEY", "secret-key")
    yield url
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("end", ["", "/", "/v1", "/v1/"])
def test_an_app_elsewhere_is_asked_with_the_key_of_the_environment(
    endpoint: str, end: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HEADRACE_URL", endpoint + end)
    with pytest.raises(SystemExit) as ended:
        main(["status"])
    assert ended.value.code == 0
    assert f"smollm2 at {endpoint}/v1" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["status", "--json"], '"nixl_bytes": 0'),
        (["explain", "cmpl-1", "--json"], '"request_id": "cmpl-1"'),
        (["corpus", "list"], "no corpus is loaded"),
        (["corpus", "stats", "--json"], "[]"),
        (["corpus", "load", "FILE", "--corpus", "docs"], '"docs" version 7: 3 tokens'),
        (["corpus", "remove", "docs"], '"docs" is removed'),
    ],
    ids=lambda each: " ".join(each[:2]) if isinstance(each, list) else "",
)
def test_commands_need_no_app_of_this_machine(
    arguments: list[str],
    said: str,
    endpoint: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Those that docs/running.md names; `chat` and `top` have tests of their own."""
    (tmp_path / "text.md").write_text("A text.")
    monkeypatch.setenv("HEADRACE_URL", endpoint)
    with pytest.raises(SystemExit) as ended:
        main([str(tmp_path / "text.md") if each == "FILE" else each for each in arguments])
    assert ended.value.code == 0
    assert said in capsys.readouterr().out


def test_a_wrong_key_is_said(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_URL", endpoint)
    monkeypatch.setenv("HEADRACE_API_KEY", "wrong-key")
    with pytest.raises(CliError, match="asks for an API key"):
        client.running_instance(None)


def test_what_is_not_headrace_is_said(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_URL", f"{endpoint}/other")
    with pytest.raises(CliError, match="is not Headrace"):
        client.running_instance(None)


@pytest.mark.parametrize("url", ["10.0.0.1:8000", "ftp://a", "http://", "http://a/?key=1"])
def test_what_is_no_url_is_refused(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_URL", url)
    with pytest.raises(CliError, match='must be like "http://HOST:PORT"'):
        client.running_instance(None)


def test_a_name_wins_over_the_url(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_URL", endpoint)
    with pytest.raises(CliError, match='no instance called "mine"'):
        client.running_instance("mine")
