"""`headrace chat` and the display of `headrace up`, without an endpoint."""

import io
from collections.abc import Iterable

import pytest
from rich.console import Console

from headrace.cli.chat import Conversation
from headrace.cli.console import CliError, human_bytes, human_seconds
from headrace.cli.deploy import DeploymentProgress, Progress, cause, failure
from headrace.cli.display import Display


def test_a_conversation_remembers_what_was_said() -> None:
    seen: list[list[str]] = []

    def send(messages: list[dict[str, str]]) -> Iterable[str]:
        seen.append([m["role"] for m in messages])
        yield from ("Par", "is")

    written: list[str] = []
    talk = Conversation(send, system="Be brief.")
    talk.say("Capital of France?", written.append)
    talk.say("And of Italy?", written.append)
    assert written == ["Par", "is", "Par", "is"]
    assert seen == [["system", "user"], ["system", "user", "assistant", "user"]]
    assert talk.messages[2] == {"role": "assistant", "content": "Paris"}
    talk.reset()
    assert talk.messages == [{"role": "system", "content": "Be brief."}]


def test_an_interrupted_answer_keeps_what_came_and_an_unanswered_message_goes() -> None:
    def half(messages: list[dict[str, str]]) -> Iterable[str]:
        yield "Once upon"
        raise KeyboardInterrupt

    def none(messages: list[dict[str, str]]) -> Iterable[str]:
        raise CliError("no")
        yield ""

    talk = Conversation(half)
    with pytest.raises(KeyboardInterrupt):
        talk.say("A story", lambda piece: None)
    assert [m["content"] for m in talk.messages] == ["A story", "Once upon"]
    talk = Conversation(none)
    with pytest.raises(CliError):
        talk.say("A story", lambda piece: None)
    assert talk.messages == []


def test_the_cause_is_the_last_line_of_the_last_traceback() -> None:
    message = (
        "The deployment failed to start 3 times in a row. Error:\n"
        "\x1b[36mray::X()\x1b[39m (pid=1)\n  File 'x.py'\nRuntimeError: Traceback\n"
        "  ValueError: no room for one request\n"
    )
    deployments = (
        DeploymentProgress("prefill", "UPDATING", 0, 1, "waiting"),
        DeploymentProgress("decode", "DEPLOY_FAILED", 0, 0, message),
    )
    assert cause(message) == "ValueError: no room for one request"
    ours = (
        "Traceback:\nheadrace_engine.reporting.start_errors.EngineStartError: the engine: no room"
    )
    assert cause(ours) == "the engine: no room"
    now = Progress("DEPLOY_FAILED", "whole app", deployments)
    assert failure(now) == "decode: ValueError: no room for one request"
    assert failure(Progress("DEPLOY_FAILED", "", ())) == "the app is deploy_failed"


def test_without_a_terminal_each_change_is_one_plain_line() -> None:
    out = io.StringIO()
    with Display(Console(file=out, width=100)) as display:
        display.step("loading the engines")
        for running in (0, 0, 1):
            status = "HEALTHY" if running else "UPDATING"
            deployment = DeploymentProgress("decode", status, running, 1, "")
            display.show(Progress("DEPLOYING", "", (deployment,)))
    lines = [line.split("] ")[1] for line in out.getvalue().splitlines()]
    assert lines == [
        "loading the engines",
        "decode: updating, 0 of 1 replicas run",
        "decode: healthy, 1 of 1 replicas run",
    ]


def test_a_terminal_gets_a_live_table() -> None:
    out = io.StringIO()
    console = Console(file=out, width=120, force_terminal=True)
    with Display(console) as display:
        display.step("loading [the] engines")
        deployment = DeploymentProgress("decode", "UPDATING", 0, 1, "[x] odd markup")
        display.show(Progress("DEPLOYING", "", (deployment,)))
        console.print(display.__rich__())
        display.step("next")
    assert "loading [the] engines" in out.getvalue()
    assert "[x] odd markup" in out.getvalue()


@pytest.mark.parametrize(("count", "text"), [(0, "0 B"), (1536, "1.5 KiB"), (3 * 2**30, "3.0 GiB")])
def test_bytes_are_readable(count: int, text: str) -> None:
    assert human_bytes(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(7.9, "7 s"), (75, "1 min 15 s"), (3723, "1 h 2 min")]
)
def test_seconds_are_readable(seconds: float, text: str) -> None:
    assert human_seconds(seconds) == text
