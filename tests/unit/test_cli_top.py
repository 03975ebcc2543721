"""`headrace top`: one frame where the output is no terminal, else a screen until Ctrl-C."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from headrace.cli import client
from headrace.cli.console import CliError
from headrace.cli.show import top
from headrace.cli.state import Instance

URL = "http://127.0.0.1:8000"
REQUEST = {
    "id": "cmpl-[bold]1",
    "path": "/v1/completions",
    "age_s": 75.2,
    "ttft_s": None,
    "sent_bytes": 2048,
    "replica": "zyxwvuts987",
}
STATE = {"replicas": [{"role": "decode", "replica_id": "zyxwvuts987", "running": 3}]}


def state(*requests: dict[str, Any]) -> dict[str, Any]:
    return {**STATE, "gateway": {"requests": list(requests)}}


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """The terminal of a running instance."""
    out = io.StringIO()
    instance = Instance("default", "t", endpoint=URL, model="smollm2")
    monkeypatch.setattr(client, "running_instance", lambda name: instance)
    terminal = Console(file=out, force_terminal=True, width=160, height=50)
    monkeypatch.setattr(top, "stdout", lambda: terminal)
    return out


def answers(monkeypatch: pytest.MonkeyPatch, *told: dict[str, Any] | CliError) -> list[float]:
    """Have the endpoint tell this, once each; Ctrl-C after the last. The sleeps between."""
    left, slept = list(told), []

    def ask(instance: Instance, path: str) -> dict[str, Any]:
        assert path == "/headrace/v1/console"
        one = left.pop(0)
        if isinstance(one, CliError):
            raise one
        return one

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if not left:
            raise KeyboardInterrupt

    monkeypatch.setattr(client, "get_json", ask)
    monkeypatch.setattr(top.time, "sleep", sleep)
    return slept


def test_once_prints_requests_and_replicas_and_ends(
    screen: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept = answers(monkeypatch, state(REQUEST))
    top.top(None, every_s=2, once=True)
    assert slept == []
    told = screen.getvalue()
    for part in ("cmpl-[bold]1", "1 min 15 s", "waits", "2.0 KiB", "decode/zyxwvuts"):
        assert part in told, told


def test_an_output_that_is_no_terminal_gets_one_frame(
    screen: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(top, "stdout", lambda: Console(file=screen, width=160))
    assert answers(monkeypatch, state()) == []
    top.top(None, every_s=2, once=False)
    assert "no request in flight" in screen.getvalue()


def test_it_goes_on_when_the_app_does_not_answer_for_a_while(
    screen: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept = answers(monkeypatch, state(), CliError("does not answer"), state(REQUEST))
    with pytest.raises(KeyboardInterrupt):
        top.top(None, every_s=3, once=False)
    assert slept == [3, 3, 3]
    told = screen.getvalue()
    assert told.index("no request in flight") < told.index("does not answer")
    assert told.index("does not answer") < told.index("1 min 15 s")


def test_without_a_gateway_there_is_nobody_to_ask(
    screen: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    instance = Instance("default", "t", endpoint=URL, model="smollm2", token_path="direct")
    monkeypatch.setattr(client, "running_instance", lambda name: instance)
    with pytest.raises(CliError, match='token_path "direct" has no gateway'):
        top.top(None, every_s=2, once=True)
