"""`headrace chat`: a conversation with the running model; tokens are printed as they arrive."""

from __future__ import annotations

import ssl
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from headrace.cli import client
from headrace.cli.console import CliError, stderr

HELP = "/reset starts a new conversation; /exit or Ctrl-D quits; Ctrl-C interrupts an answer"

# Sends a conversation, yields the answer's pieces of text.
Send = Callable[[list[dict[str, str]]], Iterable[str]]


class Conversation:
    """The messages of a conversation."""

    def __init__(self, send: Send, system: str | None = None) -> None:
        self._send = send
        self._system = system
        self.messages: list[dict[str, str]] = []
        self.reset()

    def reset(self) -> None:
        """Forget everything but the system prompt."""
        self.messages = [{"role": "system", "content": self._system}] if self._system else []

    def say(self, text: str, write: Callable[[str], None]) -> None:
        """Send one message, and write the pieces of the answer as they arrive.

        If the answer is interrupted, the part that arrived stays in the conversation. If nothing
        arrived, the message is removed from it.
        """
        self.messages.append({"role": "user", "content": text})
        pieces: list[str] = []
        try:
            for piece in self._send(self.messages):
                pieces.append(piece)
                write(piece)
        finally:
            if pieces:
                self.messages.append({"role": "assistant", "content": "".join(pieces)})
            else:
                self.messages.pop()


def chat(
    name: str | None,
    model: str | None,
    system: str | None,
    message: str | None,
    sampling: Mapping[str, Any],
) -> None:
    """Print one answer if a message is given or piped in; otherwise start a conversation.

    Args:
        name: the instance. model: None for the instance's model. system: the system prompt.
        sampling: fields of the request that say how to answer.
    """
    instance = client.running_instance(name)
    send = _openai_send(
        f"{instance.endpoint}/v1",
        client.api_key(instance),
        model or instance.model,
        sampling,
        client.trust(instance),
    )
    conversation = Conversation(send, system)
    if message is None and not sys.stdin.isatty():
        message = sys.stdin.read().strip()
        if not message:
            raise CliError("no question: stdin is empty", 2)
    if message is not None:
        try:
            conversation.say(message, _write)
        finally:
            _write("\n")
        return
    _loop(conversation, f"{model or instance.model} at {instance.endpoint}")


def _loop(conversation: Conversation, title: str) -> None:
    import readline  # noqa: F401  (line editing and history for input())

    notes = stderr()
    notes.print(f"{title}\n{HELP}", style="dim", markup=False)
    while True:
        try:
            text = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            _write("\n")
            return
        if text in ("/exit", "/quit"):
            return
        if text == "/reset":
            conversation.reset()
            notes.print("new conversation", style="dim")
            continue
        if text.startswith("/"):
            notes.print(HELP, style="dim", markup=False)
            continue
        if text:
            try:
                conversation.say(text, _write)
            except KeyboardInterrupt:
                pass
            except CliError as error:
                notes.print(f"error: {error}", style="red", markup=False)
            _write("\n")


def _openai_send(
    base_url: str,
    key: str | None,
    model: str,
    sampling: Mapping[str, Any],
    trust: ssl.SSLContext | bool = True,
) -> Send:
    try:
        import httpx
        import openai
    except ImportError:
        raise CliError("headrace chat needs the openai package: pip install openai") from None

    timeout = httpx.Timeout(600.0, connect=5.0)
    http = httpx.Client(trust_env=False, timeout=timeout, verify=trust)
    api = openai.OpenAI(base_url=base_url, api_key=key or "none", http_client=http, max_retries=1)

    def send(messages: list[dict[str, str]]) -> Iterable[str]:
        try:
            stream: Any = api.chat.completions.create(
                model=model,
                messages=messages,
                stream=True,
                **sampling,
            )
            for chunk in stream:
                if chunk.choices and chunk.choices[0].delta.content:
                    yield chunk.choices[0].delta.content
        except openai.APIStatusError as error:
            raise CliError(f"{error.status_code}: {_message(error)}") from None
        except openai.APIConnectionError as error:
            raise CliError(f"{base_url} does not answer: {error.__cause__ or error}") from None
        except openai.APIError as error:  # an error event inside the stream
            raise CliError(str(error)) from None

    return send


def _message(error: Any) -> str:
    body = error.body if isinstance(error.body, dict) else {}
    return str(body.get("message") or error.message)


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
