"""`headrace chat`: a conversation with the running model; tokens are printed as they arrive, and
after each answer its times and the command that explains them."""

from __future__ import annotations

import secrets
import ssl
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from headrace.cli import client, state
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
    endpoint = endpoint_of(instance, sampling, model)
    conversation = Conversation(endpoint.send, system)
    if message is None and not sys.stdin.isatty():
        message = sys.stdin.read().strip()
        if not message:
            raise CliError("no question: stdin is empty", 2)
    if message is not None:
        try:
            conversation.say(message, _write)
        finally:
            _write("\n")
        stderr().print(endpoint.times(), style="dim", markup=False, highlight=False)
        return
    _loop(conversation, endpoint, f"{model or instance.model} at {instance.endpoint}")


def endpoint_of(
    instance: state.Instance, sampling: Mapping[str, Any], model: str | None = None
) -> Endpoint:
    """Return the endpoint of an instance.

    Args:
        sampling: fields of the request that say how to answer.
        model: None for the instance's model.
    """
    return Endpoint(
        f"{instance.endpoint}/v1",
        client.api_key(instance),
        model or instance.model,
        sampling,
        client.trust(instance),
    )


def _loop(conversation: Conversation, endpoint: Endpoint, title: str) -> None:
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
                _write("\n")
            except CliError as error:
                _write("\n")
                notes.print(f"error: {error}", style="red", markup=False)
            else:
                _write("\n")
                notes.print(endpoint.times(), style="dim", markup=False, highlight=False)


@dataclass(slots=True)
class LastAnswer:
    """Length and times of an answer.

    Attributes:
        request_id: the request's id.
        tokens, prompt_tokens: number of tokens of the answer and of the prompt.
        cached_tokens: number of prompt tokens that no engine computed.
        first_s: seconds to the first token; None if there was none.
        total_s: seconds to the end.
        pause_s: longest time between two pieces of the answer, in seconds.
    """

    request_id: str = ""
    tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    first_s: float | None = None
    total_s: float = 0.0
    pause_s: float = 0.0


class Endpoint:
    """An OpenAI-compatible endpoint that answers conversations.

    Args:
        base_url: up to `/v1`.
        key: the API key, if it asks for one.
        sampling: fields of the request that say how to answer.
        trust: how its certificate is verified.

    Attributes:
        last: the last answer.

    Raises:
        CliError: the package `openai` is not installed.
    """

    def __init__(
        self,
        base_url: str,
        key: str | None,
        model: str,
        sampling: Mapping[str, Any],
        trust: ssl.SSLContext | bool = True,
    ) -> None:
        try:
            import httpx
            import openai
        except ImportError:
            raise CliError("headrace chat needs the openai package: pip install openai") from None

        timeout = httpx.Timeout(600.0, connect=5.0)
        http = httpx.Client(trust_env=False, timeout=timeout, verify=trust)
        self._base_url, self._model, self._sampling = base_url, model, sampling
        self._api = openai.OpenAI(
            base_url=base_url, api_key=key or "none", http_client=http, max_retries=1
        )
        self.last = LastAnswer()

    def send(self, messages: list[dict[str, str]]) -> Iterator[str]:
        """Send a conversation, and yield the pieces of the answer.

        Raises:
            CliError: the endpoint does not answer, or refuses.
        """
        import openai

        self.last = last = LastAnswer(f"chat-{secrets.token_hex(4)}")
        began_s = said_s = time.monotonic()
        try:
            stream: Any = self._api.chat.completions.create(
                model=self._model,
                messages=messages,
                stream=True,
                stream_options={"include_usage": True},
                extra_headers={"X-Request-Id": last.request_id},
                **self._sampling,
            )
            for chunk in stream:
                if chunk.usage is not None:
                    last.tokens = chunk.usage.completion_tokens
                    last.prompt_tokens = chunk.usage.prompt_tokens
                    details = chunk.usage.prompt_tokens_details
                    last.cached_tokens = (details and details.cached_tokens) or 0
                if chunk.choices and chunk.choices[0].delta.content:
                    now_s = time.monotonic()
                    if last.first_s is None:
                        last.first_s = now_s - began_s
                    else:
                        last.pause_s = max(last.pause_s, now_s - said_s)
                    said_s = now_s
                    yield chunk.choices[0].delta.content
        except openai.APIStatusError as error:
            raise CliError(f"{error.status_code}: {_message(error)}") from None
        except openai.APIConnectionError as error:
            raise CliError(
                f"{self._base_url} does not answer: {error.__cause__ or error}"
            ) from None
        except openai.APIError as error:  # an error event inside the stream
            raise CliError(str(error)) from None
        finally:
            last.total_s = time.monotonic() - began_s

    def times(self) -> str:
        """Return the length and speed of the last answer, and the command that explains it."""
        last = self.last
        first_s = last.total_s if last.first_s is None else last.first_s
        text = f"{last.tokens} tokens; the first after {first_s:.2f} s"
        if last.tokens > 1 and last.total_s > first_s:
            text += f", then {(last.tokens - 1) / (last.total_s - first_s):.0f} a second"
        return f"{text}. Why so: headrace explain {last.request_id}"


def _message(error: Any) -> str:
    body = error.body if isinstance(error.body, dict) else {}
    return str(body.get("message") or error.message)


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
