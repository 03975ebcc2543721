"""Conversation state through the app: the same prompts as when the client sends all, and found
again after a gateway was killed."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import httpx
import openai
import pytest

from tests.support.app import MODEL, App, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SHORT: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_output_tokens": 8}
TURNS = ("What is the capital of France?", "And of Italy?", "Which is larger?")


def gateway_pid(app: App) -> int:
    return int(app.status()["gateway"]["pid"])


def kill_gateway(app: App) -> None:
    """Kill the gateway, and wait for the next one."""
    before = gateway_pid(app)
    os.kill(before, signal.SIGKILL)
    until(lambda: gateway_pid(app) != before, 120, "another gateway")


def test_each_turn_has_the_prompt_of_the_whole_conversation(client: openai.OpenAI) -> None:
    previous: str | None = None
    whole: list[Any] = []
    for text in TURNS:
        whole.append({"role": "user", "content": text})
        sent = client.responses.create(input=whole, store=False, **SHORT)
        kept = client.responses.create(input=text, previous_response_id=previous, **SHORT)
        assert kept.output_text == sent.output_text
        assert kept.usage is not None and sent.usage is not None
        assert kept.usage.input_tokens == sent.usage.input_tokens
        assert kept.previous_response_id == previous
        whole += sent.output
        previous = kept.id


def test_a_streamed_turn_is_kept_under_the_id_of_its_events(client: openai.OpenAI) -> None:
    first = client.responses.create(input=TURNS[0], **SHORT)
    events = list(
        client.responses.create(input=TURNS[1], previous_response_id=first.id, stream=True, **SHORT)
    )
    last = events[-1]
    assert last.type in ("response.completed", "response.incomplete")
    assert {event.response.id for event in events if hasattr(event, "response")} == {
        last.response.id
    }
    kept = client.responses.retrieve(last.response.id)
    assert kept.output_text == last.response.output_text
    assert kept.previous_response_id == first.id


def test_a_response_has_a_plan_under_its_id(app: App, client: openai.OpenAI) -> None:
    made = client.responses.create(input=TURNS[0], **SHORT)
    assert app.plan(made.id)["kind"] in ("local", "remote")


def test_a_conversation_goes_on_with_its_items(client: openai.OpenAI) -> None:
    conversation = client.conversations.create(
        items=[{"type": "message", "role": "system", "content": "Answer with one word."}]
    )
    for text in TURNS[:2]:
        client.responses.create(input=text, conversation=conversation.id, **SHORT)
    listed = client.conversations.items.list(conversation.id, order="asc").data
    assert [item.role for item in listed] == [  # type: ignore[union-attr]
        *("system", "user", "assistant", "user", "assistant"),
    ]
    client.conversations.delete(conversation.id)
    with pytest.raises(openai.NotFoundError):
        client.conversations.retrieve(conversation.id)


def test_a_background_response_is_polled_and_another_cancelled(client: openai.OpenAI) -> None:
    made = client.responses.create(input=TURNS[0], background=True, **SHORT)
    assert made.status == "queued"
    done = made

    def has_ended() -> bool:
        nonlocal done
        done = client.responses.retrieve(made.id)
        return done.status not in ("queued", "in_progress")

    until(has_ended, 60, "the background response ends", lambda: done.status)
    assert done.output_text
    slow = client.responses.create(
        input="Count.", background=True, **(SHORT | {"max_output_tokens": 2000})
    )
    assert client.responses.cancel(slow.id).status == "cancelled"
    assert client.responses.retrieve(slow.id).status == "cancelled"


def test_state_is_found_after_the_gateway_was_killed(app: App, client: openai.OpenAI) -> None:
    first = client.responses.create(input=TURNS[0], **SHORT)
    slow = client.responses.create(
        input="Count.", background=True, **(SHORT | {"max_output_tokens": 4000})
    )
    kill_gateway(app)
    assert client.responses.retrieve(first.id).output_text == first.output_text
    second = client.responses.create(input=TURNS[1], previous_response_id=first.id, **SHORT)
    assert second.previous_response_id == first.id
    until(
        lambda: client.responses.retrieve(slow.id).status == "failed",
        60,
        "the dead gateway's background response has failed",
    )


def test_a_stream_whose_gateway_was_killed_is_resumed_and_kept(
    app: App, client: openai.OpenAI
) -> None:
    """`headrace.client` sends it again; the response keeps its id."""
    from headrace.client import ResumingTransport

    first = client.responses.create(input=TURNS[0], **SHORT)
    before = gateway_pid(app)
    http = httpx.Client(transport=ResumingTransport(), timeout=120)
    with openai.OpenAI(
        base_url=f"{app.url}/v1", api_key="none", max_retries=0, http_client=http
    ) as resuming:
        stream = resuming.responses.create(
            input="Count from one to one hundred.",
            previous_response_id=first.id,
            stream=True,
            **(SHORT | {"max_output_tokens": 100}),
        )
        ids, killed = set(), False
        for number, event in enumerate(stream):
            if hasattr(event, "response"):
                ids.add(event.response.id)
            if number == 10 and not killed:
                os.kill(before, signal.SIGKILL)
                killed = True
                time.sleep(0.1)
        assert killed and len(ids) == 1
    until(lambda: gateway_pid(app) != before, 120, "another gateway")
    kept = client.responses.retrieve(ids.pop())
    assert kept.output_text == event.response.output_text  # type: ignore[union-attr]
