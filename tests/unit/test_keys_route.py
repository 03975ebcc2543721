"""The decode replica's route that tells which blocks a prompt has."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from headrace_decode.http.internal_port import KEYS_TARGET
from headrace_decode.rendering.keys import BlockKeysRoute, RenderedPrompt, why_not_rendered
from headrace_kvstore.lookup.availability import AvailableRun

CHAT = {"messages": [{"role": "user", "content": "Hello"}]}


def hashes(token_ids: Sequence[int], salt: str, lora: Any = None) -> list[bytes]:
    """One block a token; the key is the token."""
    return [bytes(24) + token.to_bytes(8, "big") for token in token_ids]


class Behind:
    """The application behind the route, and vLLM's rendering."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer
        self.rendered: list[tuple[str, dict[str, Any]]] = []
        self.reached: list[str] = []
        self.cancelled = False

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.reached.append(scope.get("path", scope["type"]))

    async def render(self, target: str, body: dict[str, Any]) -> RenderedPrompt | None:
        self.rendered.append((target, body))
        if isinstance(self.answer, BaseException):
            raise self.answer
        if isinstance(self.answer, asyncio.Event):
            try:
                await self.answer.wait()
            except asyncio.CancelledError:
                self.cancelled = True
                raise
        return self.answer


async def ask(behind: Behind, data: bytes, path: str = KEYS_TARGET, *, stays: bool = True) -> Any:
    """What the route sends."""
    half = len(data) // 2
    messages = [
        {"type": "http.request", "body": data[:half], "more_body": True},
        {"type": "http.request", "body": data[half:]},
    ]
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        if messages:
            return messages.pop(0)
        if stays:
            await asyncio.sleep(60)
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    route = BlockKeysRoute(behind, behind.render, hashes)
    await route({"type": "http", "path": path}, receive, send)
    return json.loads(sent[1]["body"]) if sent else None


def question(body: Any = CHAT, target: str = "/v1/chat/completions") -> bytes:
    return json.dumps({"target": target, "body": body}).encode()


async def test_the_keys_of_a_prompts_blocks_are_told_as_numbers_of_64_bits() -> None:
    behind = Behind(RenderedPrompt([5, 2**40], "salt", "n > 1"))
    told = await ask(behind, question())
    keys = np.frombuffer(base64.b64decode(told.pop("keys")), "<u8")
    assert keys.tolist() == [5, 2**40]
    assert told == {
        "prompt_tokens": 2,
        "local_only": "n > 1",
        "machine": "",
        "stored": [],
    }
    assert behind.rendered == [("/v1/chat/completions", CHAT)]


async def test_a_prompt_whose_hashes_need_more_than_its_tokens_has_no_keys_but_a_length() -> None:
    told = await ask(Behind(RenderedPrompt([5, 6], "", "an adapter", plain=False)), question())
    assert (told["prompt_tokens"], told["keys"]) == (2, "")


async def test_the_adapter_of_a_prompt_is_told_and_its_blocks_are_not_looked_for() -> None:
    asked: list[Any] = []

    def hashes_of(token_ids: Sequence[int], salt: str, lora: Any) -> list[int]:
        asked.append(lora)
        return list(token_ids)

    async def available_runs(token_ids: Sequence[int], salt: str) -> list[AvailableRun]:
        raise AssertionError("the store knows them by other names")

    behind = Behind(RenderedPrompt([5, 6], "", lora=("sql", "/a/0f"), adapter="0f"))
    route = BlockKeysRoute(behind, behind.render, hashes_of, available_runs)
    told = await route.answer(question())
    assert told["adapter"] == "0f" and told["keys"] and told["stored"] == []
    assert asked == [("sql", "/a/0f")]


async def test_what_the_machines_store_could_supply_is_told_where_it_would_be_used() -> None:
    async def available_runs(token_ids: Sequence[int], salt: str) -> list[AvailableRun]:
        return [AvailableRun("dram", len(token_ids)), AvailableRun("nvme", 16, 0.5)]

    for prompt, stored in (
        (RenderedPrompt([5, 6], ""), [["dram", 2, 0.0], ["nvme", 16, 0.5]]),
        (RenderedPrompt([5, 6], "", "n > 1"), []),
        (RenderedPrompt([5, 6], "", plain=False), []),
    ):
        behind = Behind(prompt)
        told = await BlockKeysRoute(behind, behind.render, hashes, available_runs, "a").answer(
            question()
        )
        assert (told["machine"], json.loads(json.dumps(told["stored"]))) == ("a", stored)


@pytest.mark.parametrize(
    "answer", [None, RenderedPrompt((), ""), ValueError("bad"), RuntimeError("x")]
)
async def test_without_a_prompt_there_are_no_keys_and_no_error(answer: Any) -> None:
    told = await ask(Behind(answer), question())
    assert told["keys"] is None and told["why"]


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"{}", b"[" * 5000, question(body=[])])
async def test_what_is_no_question_has_no_keys(data: bytes) -> None:
    behind = Behind(RenderedPrompt([1], ""))
    assert (await ask(behind, data))["keys"] is None
    assert behind.rendered == []


async def test_everything_else_passes() -> None:
    behind = Behind(None)
    for path in ("/v1/chat/completions", KEYS_TARGET + "/", "/health"):
        assert await ask(behind, b"", path) is None
    await BlockKeysRoute(behind, behind.render, hashes)({"type": "lifespan"}, None, None)
    assert behind.reached == ["/v1/chat/completions", KEYS_TARGET + "/", "/health", "lifespan"]


async def test_rendering_ends_when_the_caller_leaves() -> None:
    behind = Behind(asyncio.Event())
    assert await ask(behind, question(), stays=False) is None
    await asyncio.sleep(0)
    assert behind.cancelled


def parts(*parts: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(parts)}]}


TEXT = {"type": "text", "text": "Hello"}
IMAGE = {"type": "image_url", "image_url": {"url": "http://somewhere/"}}


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": ["a", "b"]},
        {"prompt": [[1, 2], [3]]},
        {"prompt": "a", "use_beam_search": True},
        {"prompt_embeds": "AAAA"},
        parts(TEXT, IMAGE),
        parts({"image_url": {"url": "http://somewhere/"}}),
        parts({**TEXT, "uuid": "x", "image_url": "http://somewhere/"}),
        parts({"type": "tool_result", "content": [{"type": "image", "source": {}}]}),
        {"input": [{"type": "message", "content": [{"type": "input_image", "image_url": "x"}]}]},
        {"input": [{"type": "function_call_output", "output": [{"type": "input_image"}]}]},
    ],
)
def test_what_is_not_one_prompt_of_text_is_not_rendered_in_advance(body: dict[str, Any]) -> None:
    assert why_not_rendered(body)


@pytest.mark.parametrize(
    "body",
    [
        CHAT,
        parts(TEXT, "text", {"type": "tool_result", "content": [TEXT]}),
        {"prompt": "a"},
        {"prompt": ["a"]},
        {"prompt": [1, 2, 3]},
        {"prompt": [[1, 2, 3]]},
        {"input": "a"},
        {"input": [{"role": "user", "content": [{"type": "input_text", "text": "a"}]}]},
        {"messages": "nonsense", "input": [7, None]},
    ],
)
def test_one_prompt_of_text_is(body: dict[str, Any]) -> None:
    assert why_not_rendered(body) is None
