"""`headrace demo`: shows on the running app, step by step, what it does that others do not.

Each step announces itself, waits for Enter, sends real requests, and ends with measured figures.
One step kills a replica of the app with SIGKILL. It is skipped for an app that was not started on
this machine.
"""

from __future__ import annotations

import secrets
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import psutil

from headrace.cli import client, state
from headrace.cli.chat import Endpoint, endpoint_of
from headrace.cli.console import CliError, stdout
from headrace.cli.show import explain

QUESTION = "What is the capital of France?"
TIMES = 2
"""How often it is asked: a router that was idle uses the first request to measure another way."""
STORY = "Tell me a story about a river that drives a mill."
STORY_TOKENS, KILL_AFTER = 64, 10
"""Length of the answer during which a replica is killed, and number of pieces before the kill."""
LIST_TOKENS = 12
READY_LIMIT_S = 300.0
ROWS = 40
"""Rows of the long prompt: about 900 tokens."""

LIST = "\n".join(
    f"Mill {row}: {row * 37 % 101} cubic metres a second, {row * 53 % 97} metres of head."
    for row in range(ROWS)
)
LIST_QUESTION = "Write the line of mill 7 again."


class Skipped(Exception):
    """A step cannot be shown on this app. The message says why."""


@dataclass(frozen=True)
class Step:
    """One step.

    Attributes:
        title: what it shows.
        about: what will happen, in one or two sentences.
        run: does it.
    """

    title: str
    about: str
    run: Callable[[], None]


class Demo:
    """The steps on one app.

    Args:
        instance: the running app.
        write: prints text as it is.
    """

    def __init__(self, instance: state.Instance, write: Callable[[str], None]) -> None:
        self._instance, self._write = instance, write
        self._asked = ""
        # A number in front, so that an earlier demo's KV is of no use.
        number = secrets.randbelow(10**6)
        self._long_prompt = f"List {number}:\n{LIST}\n{LIST_QUESTION}"
        self._first_s: float | None = None
        self.steps = (
            Step(
                "Ask a question, twice",
                "The endpoint speaks OpenAI's API. Any client works.",
                self._ask,
            ),
            Step(
                "See the price of the second answer",
                "For each request, the router predicts in seconds what every way of serving it "
                "costs, and takes the cheapest. Then it measures.",
                self._explain,
            ),
            Step(
                "Ask about a long text twice",
                "The second request finds the KV of the first, and computes only what is new.",
                self._long_twice,
            ),
            Step(
                "Kill a replica in the middle of an answer",
                "kill -9 on the decode replica that writes the answer. Another replica continues "
                "after the last token that you have.",
                self._kill,
            ),
            Step(
                "Ask about the long text again, at a new replica",
                "The killed replica's memory is gone. Its KV is still in the machine's KV store. "
                "This waits until Ray Serve has started the new replica.",
                self._long_again,
            ),
        )

    def _say(self, text: str) -> None:
        self._write(text + "\n")

    def _status(self) -> dict[str, Any]:
        status: dict[str, Any] = client.get_json(self._instance, "/headrace/v1/status")
        return status

    def _answer(
        self, prompt: str, max_tokens: int, on_piece: Callable[[int], None] = lambda count: None
    ) -> Endpoint:
        """Print the answer to a prompt, and call `on_piece` with the number of its pieces."""
        endpoint = endpoint_of(self._instance, {"max_tokens": max_tokens, "temperature": 0.0})
        messages = [{"role": "user", "content": prompt}]
        for count, piece in enumerate(endpoint.send(messages), 1):
            self._write(piece)
            on_piece(count)
        self._say("")
        return endpoint

    def _ask(self) -> None:
        for _ in range(TIMES):
            self._say(f"> {QUESTION}")
            endpoint = self._answer(QUESTION, 64)
            self._asked = endpoint.last.request_id
            self._say(endpoint.times())

    def _explain(self) -> None:
        self._say(f"$ headrace explain {self._asked}")
        plan = client.get_json(self._instance, f"/headrace/v1/plans/{self._asked}")
        explain.render(plan, stdout())

    def _long_twice(self) -> None:
        self._say(f"> {ROWS} lines about mills. {LIST_QUESTION}")
        first = self._answer(self._long_prompt, LIST_TOKENS).last
        again = self._answer(self._long_prompt, LIST_TOKENS).last
        self._first_s = first.first_s
        for when, each in (("first", first), ("second", again)):
            self._say(
                f"{when} time: first token after {each.first_s or each.total_s:.2f} s; "
                f"{each.cached_tokens} of {each.prompt_tokens} prompt tokens not computed"
            )

    def _kill(self) -> None:
        replica = self._decode_process()
        self._say(f"> {STORY}")

        def on_piece(count: int) -> None:
            if count == KILL_AFTER:
                replica.send_signal(signal.SIGKILL)
                self._write(f" [kill -9 {replica.pid}] ")

        last = self._answer(STORY, STORY_TOKENS, on_piece).last
        found = client.get_json(self._instance, "/headrace/v1/requests")["finished"]
        mine = next((each for each in found if each["id"] == last.request_id), None)
        if mine is None or not mine["resumed"]:
            raise CliError("no other replica took the answer over; headrace status says more")
        self._say(
            f"{last.tokens} of {STORY_TOKENS} tokens arrived. The longest pause was "
            f"{last.pause_s:.1f} s. {self._named(mine['replica'])} wrote the rest."
        )

    def _named(self, replica: str) -> str:
        """Return a replica's name at the start of a sentence, with what it usually does."""
        replicas = self._status()["replicas"]
        role = next((each["role"] for each in replicas if each["replica_id"] == replica), "")
        if role == "prefill":
            return f"Prefill replica {replica}, which stands in for the decode replica,"
        return f"Replica {replica}"

    def _decode_process(self) -> psutil.Process:
        """Return the process of a decode replica.

        Raises:
            Skipped: it does not run here, or no other replica can continue an answer.
        """
        if not self._instance.own_node or not self._instance.temp_dir:
            raise Skipped("only for an app that `headrace up` started on this machine")
        replicas = self._status()["replicas"]
        pids = [each["pid"] for each in replicas if each["role"] == "decode"]
        if len(replicas) < 2 or not pids:
            raise Skipped("no other replica could continue the answer")
        own = {each.pid: each for each in self._instance.matcher().processes().values()}
        if pids[0] not in own:
            raise Skipped(f"process {pids[0]} does not belong to this app")
        return own[pids[0]]

    def _long_again(self) -> None:
        self._wait_for_decode()
        self._say(f"> {ROWS} lines about mills. {LIST_QUESTION}")
        last = self._answer(self._long_prompt, LIST_TOKENS).last
        text = (
            f"first token after {last.first_s or last.total_s:.2f} s; {last.cached_tokens} of "
            f"{last.prompt_tokens} prompt tokens not computed"
        )
        if self._first_s is not None:
            text += f". To compute all of them took {self._first_s:.2f} s"
        self._say(text)

    def _wait_for_decode(self) -> None:
        """Wait until a decode replica answers.

        Raises:
            CliError: none does within `READY_LIMIT_S`.
        """
        began_s = time.monotonic()
        while not any(each["role"] == "decode" for each in self._status()["replicas"]):
            if time.monotonic() - began_s > READY_LIMIT_S:
                raise CliError("no decode replica became ready; headrace status says more")
            time.sleep(1.0)
        waited_s = time.monotonic() - began_s
        if waited_s > 1.0:
            self._say(f"a new decode replica is ready after {waited_s:.0f} s")


def demo(name: str | None, *, ask: bool) -> None:
    """Play all steps.

    Args:
        name: the instance.
        ask: whether to wait for Enter before each.

    Raises:
        CliError: no app runs, or a step failed.
    """
    if ask and not sys.stdin.isatty():
        raise CliError("headrace demo asks before each step: run it in a terminal, or give --yes")
    instance = client.running_instance(name)
    out = stdout()
    played = Demo(instance, _write)
    for number, step in enumerate(played.steps, 1):
        out.print(f"\n[bold]{number} of {len(played.steps)}: {step.title}[/bold]")
        out.print(step.about, style="dim", markup=False, soft_wrap=False)
        if ask and not _agreed():
            return
        try:
            step.run()
        except Skipped as why:
            out.print(f"skipped: {why}", markup=False)
    out.print(f"\nMore: {instance.endpoint}/console, headrace status, headrace top", markup=False)


def _agreed() -> bool:
    """Return whether the reader wants the step; ending the input is a no."""
    try:
        return input("Enter plays it, q ends: ").strip().lower() not in ("q", "quit", "exit")
    except (EOFError, KeyboardInterrupt):
        sys.stdout.write("\n")
        return False


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
