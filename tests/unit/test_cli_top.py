"""`headrace top`: one screen of 24 lines that keys and Ctrl-C steer, or JSON documents."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from typing import Any

import pytest
from rich.console import Console

from headrace.cli import client
from headrace.cli.console import CliError
from headrace.cli.show import top
from headrace.cli.state import Instance

URL = "http://127.0.0.1:8000"
REPLICA = {"role": "decode", "replica_id": "zyxwvuts987", "running": 3, "kv_usage": 0.5}
HEALTH = {"state": "ok", "problems": [], "answering": 1, "expected": 1}
HISTORY = {
    "last": {
        "requests_per_s": 0.4,
        "tokens_per_s": 12.3,
        "error_rate": 0.02,
        "ttft_p50_s": 0.41,
        "ttft_p99_s": 1.2,
        "tpot_p50_s": 0.03,
        "tpot_p99_s": None,
    },
    "series": [{"step_s": 10, "requests": [0, 4, 8]}],
}


def flying(name: str = "cmpl-[bold]1", **other: Any) -> dict[str, Any]:
    one = {"id": name, "path": "/v1/completions", "at": 990.0, "age_s": 10.0, "ttft_s": None}
    return {**one, "tokens": None, "replica": "zyxwvuts987", **other}


def finished(name: str, **other: Any) -> dict[str, Any]:
    return flying(name, status=200, error=None, ttft_s=0.2, total_s=2.0, tokens=17) | other


Documents = dict[str, Any]


def documents(
    *in_flight: dict[str, Any],
    ended: list[dict[str, Any]] | None = None,
    replicas: int = 1,
) -> Documents:
    return {
        "/headrace/v1/console": {"health": HEALTH, "replicas": [REPLICA] * replicas},
        "/headrace/v1/history": HISTORY,
        top.PATH: {"now": 1000.0, "in_flight": list(in_flight), "finished": ended or []},
    }


class Terminal(io.StringIO):
    """A terminal of 24 lines and 80 columns."""

    def console(self) -> Console:
        return Console(file=self, force_terminal=True, width=80, height=24)


class FakeKeyboard:
    """Gives the keys of a test, one at each wait; then Ctrl-C."""

    keys: list[str] = []
    waits: list[float] = []

    def __enter__(self) -> FakeKeyboard:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def wait(self, seconds: float) -> str:
        self.waits.append(seconds)
        if not self.keys:
            raise KeyboardInterrupt
        return self.keys.pop(0)


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """The terminal of a running instance."""
    out = Terminal()
    instance = Instance("default", "t", endpoint=URL, model="smollm2")
    monkeypatch.setattr(client, "running_instance", lambda name: instance)
    monkeypatch.setattr(top, "stdout", out.console)
    monkeypatch.setattr(top, "Keyboard", FakeKeyboard)
    return out


Answers = Callable[..., list[str]]


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Answers:
    """Set the states that the endpoint gives, one at each refresh, and the keys between them.
    Returns the paths that are asked for."""

    def set_answers(*states: Documents | CliError, keys: str = "") -> list[str]:
        left, asked = list(states), []
        FakeKeyboard.keys, FakeKeyboard.waits = ["" if key == " " else key for key in keys], []

        def get(instance: Instance, path: str) -> Any:
            asked.append(path)
            if path == "/headrace/v1/console" and len(asked) > 1 and len(left) > 1:
                left.pop(0)
            if isinstance(left[0], CliError):
                raise left[0]
            return left[0][path]

        monkeypatch.setattr(client, "get_json", get)
        return asked

    return set_answers


def run(*, once: bool = False, as_json: bool = False) -> None:
    top.top(None, every_s=2, once=once, as_json=as_json)


def test_once_prints_rates_times_replicas_and_requests(screen: Terminal, answers: Answers) -> None:
    answers(documents(flying(), ended=[finished("cmpl-0")]))
    run(once=True)
    told = screen.getvalue()
    for part in (
        ": 1 of 1 replicas answer",
        "requests/s 0.40   tokens/s 12.3   errors 2.0%",
        "TTFT p50 410 ms, p99 1.20 s   TPOT p50 30 ms, p99 -",
        "▁▅█",
        "decode/zyxwvuts",
        "#####.....",
        "cmpl-[bold]1",
        "waits",
        "cmpl-0",
    ):
        assert part in told, told


def test_an_output_that_is_no_terminal_gets_one_frame(
    screen: Terminal, answers: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(top, "stdout", lambda: Console(file=screen, width=80))
    assert len(answers(documents())) == 0
    run()
    assert "no request in flight" in screen.getvalue()


@pytest.mark.parametrize("replicas", [1, 30])
@pytest.mark.parametrize("requests", [0, 2, 100])
def test_a_screen_fits_24_lines_and_80_columns(replicas: int, requests: int) -> None:
    flown = [flying(f"chatcmpl-{n:032}") for n in range(min(50, requests))]
    ended = [finished(f"chatcmpl-{n:032}") for n in range(requests)]
    found = documents(*flown, ended=ended, replicas=replicas)
    out = io.StringIO()
    console = Console(file=out, width=80)
    for part in top.frame(top.Snapshot(*found.values()), 80, 23, top.ORDERS[0]):
        console.print(part)
    lines = out.getvalue().splitlines()
    assert len(lines) <= 23 and max(map(len, lines)) <= 80


def test_it_continues_when_the_app_does_not_answer_for_a_while(
    screen: Terminal, answers: Answers
) -> None:
    answers(documents(), CliError("does not answer"), documents(flying()), keys="  ")
    run()
    told = screen.getvalue()
    assert told.index("no request in flight") < told.index("does not answer")
    assert told.index("does not answer") < told.index("cmpl-[bold]1")


def test_q_and_ctrl_c_end_it_without_an_error(screen: Terminal, answers: Answers) -> None:
    answers(documents(), keys="q")
    run()
    answers(documents(), keys="")
    run()


def test_s_sorts_the_requests_without_asking_the_app(screen: Terminal, answers: Answers) -> None:
    ended = [finished("quick", ttft_s=0.1, at=999.0), finished("slow", ttft_s=9.0, at=900.0)]
    asked = answers(documents(ended=ended), keys="sq")
    run()
    newest, slowest = screen.getvalue().split("slowest first token")
    assert newest.index("quick") < newest.index("slow")
    assert slowest.index("slow") < slowest.index("quick") and len(asked) == 3


def test_p_keeps_the_screen_until_p_is_pressed_again(screen: Terminal, answers: Answers) -> None:
    asked = answers(documents(), documents(flying()), keys="p  q")
    run()
    assert len(asked) == 3 and "paused" in screen.getvalue()
    asked = answers(documents(), documents(flying()), keys="pp q")
    run()
    assert len(asked) == 6


def test_json_is_a_document_with_all_of_it(
    screen: Terminal, answers: Answers, capsys: pytest.CaptureFixture[str]
) -> None:
    answers(documents(flying()))
    run(once=True, as_json=True)
    (line,) = capsys.readouterr().out.splitlines()
    found = json.loads(line)
    assert found["health"] == HEALTH and found["history"] == HISTORY
    assert found["requests"]["in_flight"][0]["id"] == "cmpl-[bold]1"
