"""Batches through the app and OpenAI's client: the answers of the same requests sent alone, and a
batch that goes on after its gateway was killed."""

from __future__ import annotations

import json
import os
import signal
import time
from typing import Any

import httpx
import openai
import pytest

from tests.support.app import MODEL, App, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

CHAT = "/v1/chat/completions"
MANY = 60
"""Lines, so that some are left when the first ten are answered."""
ENDED = ("completed", "failed", "expired", "cancelled")


def body(number: int) -> dict[str, Any]:
    message = {"role": "user", "content": f"Say the number {number} in words."}
    return {"model": MODEL, "messages": [message], "temperature": 0, "max_tokens": 8}


def start(client: openai.OpenAI, count: int) -> Any:
    lines = (
        {"custom_id": f"n{number}", "method": "POST", "url": CHAT, "body": body(number)}
        for number in range(count)
    )
    data = "\n".join(map(json.dumps, lines)).encode()
    file = client.files.create(file=("numbers.jsonl", data), purpose="batch")
    return client.batches.create(
        input_file_id=file.id, endpoint=CHAT, completion_window="24h", metadata={"of": "e2e"}
    )


def ended(client: openai.OpenAI, batch_id: str, limit_s: float = 300) -> Any:
    """The batch when it has ended, also while its gateway is away."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        try:
            found = client.batches.retrieve(batch_id)
            if found.status in ENDED:
                return found
        except openai.APIConnectionError:
            pass
        time.sleep(0.3)
    raise AssertionError("the batch did not end")


def texts(client: openai.OpenAI, file_id: str) -> dict[str, str]:
    lines = [json.loads(each) for each in client.files.content(file_id).read().splitlines()]
    found = {
        each["custom_id"]: each["response"]["body"]["choices"][0]["message"]["content"]
        for each in lines
    }
    assert len(found) == len(lines), "a line is in the output twice"
    return found


def test_a_batch_has_the_answers_of_the_same_requests_sent_alone(client: openai.OpenAI) -> None:
    done = ended(client, start(client, 12).id)
    assert (done.status, done.metadata) == ("completed", {"of": "e2e"})
    counts = done.request_counts
    assert (counts.total, counts.completed, counts.failed) == (12, 12, 0)
    found = texts(client, done.output_file_id)
    assert list(found) == [f"n{number}" for number in range(12)]
    for number in (0, 7):
        alone = client.chat.completions.create(**body(number))
        assert found[f"n{number}"] == alone.choices[0].message.content
    assert done.id in [each.id for each in client.batches.list()]
    listed = [each.id for each in client.files.list()]
    assert done.input_file_id in listed and done.output_file_id in listed
    for file_id in (done.input_file_id, done.output_file_id):
        until(lambda file_id=file_id: deleted(client, file_id), 30, "the file is deleted")


def deleted(client: openai.OpenAI, file_id: str) -> bool:
    """Whether a file could be deleted; a batch is cleaned up a moment after its end."""
    try:
        return bool(client.files.delete(file_id).deleted)
    except openai.ConflictError:
        return False


def test_a_batch_goes_on_after_its_gateway_was_killed(client: openai.OpenAI, app: App) -> None:
    made = start(client, MANY)

    def progress() -> int:
        unfinished = app.status()["gateway"]["batches"]
        return next((each["completed"] for each in unfinished if each["id"] == made.id), 0)

    until(lambda: progress() >= 10, 60, "some lines are answered")
    before = int(app.status()["gateway"]["pid"])
    os.kill(before, signal.SIGKILL)

    def is_back() -> bool:
        try:
            return int(app.status()["gateway"]["pid"]) != before
        except (httpx.HTTPError, AssertionError):
            return False

    until(is_back, 120, "another gateway")
    done = ended(client, made.id)
    assert (done.status, done.request_counts.completed) == ("completed", MANY)
    assert set(texts(client, done.output_file_id)) == {f"n{number}" for number in range(MANY)}


def test_a_batch_is_cancelled(client: openai.OpenAI) -> None:
    made = start(client, 500)
    assert client.batches.cancel(made.id).status == "cancelling"
    done = ended(client, made.id)
    assert done.status == "cancelled"
    answered = 0 if done.output_file_id is None else len(texts(client, done.output_file_id))
    assert answered == done.request_counts.completed < 500
