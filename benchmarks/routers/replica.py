"""An emulated engine's HTTP face: vLLM's routes, and those that our decode replicas add.

    POST /v1/completions, GET /v1/models, /health, and what the Rust routers ask at their start
    POST /headrace/internal/keys                       the keys of a prompt's blocks

A prompt is text of `words`. The answer is `max_tokens` times the same token.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable
from typing import Any, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from benchmarks.routers.engine import Engine, Machine, Request
from benchmarks.routers.http import Exchange, chunk
from benchmarks.routers.pacing import Pacer
from benchmarks.routers.words import ANSWER, tokens_of
from benchmarks.routers.work import ROOT
from headrace_kvstore.identity.prompt_hash import hash_prompt

MODEL = "emu"
KEYS_PATH = "/headrace/internal/keys"
_EVENT = (
    b'data: {"id":"cmpl-0123456789abcdef","object":"text_completion","created":1750000000,'
    b'"model":"emu","choices":[{"index":0,"text":"%b","logprobs":null,"finish_reason":%b}]}\n\n'
)
_TOKEN = chunk(_EVENT % (ANSWER.encode(), b"null"))
_LAST = chunk(_EVENT % (ANSWER.encode(), b'"length"')) + chunk(b"data: [DONE]\n\n")


class Asked(msgspec.Struct):
    """The fields of a completion's body that are used here."""

    prompt: str
    max_tokens: int = 16
    stream: bool = False


class _KeysAsked(msgspec.Struct):
    body: Asked


_decode = msgspec.json.Decoder(Asked).decode
_decode_keys = msgspec.json.Decoder(_KeysAsked).decode


class Ears(Protocol):
    """Receiver of an engine's events."""

    def heard(self, plan: bytes) -> None:
        """Called when a request with this plan arrives."""

    def changed(self) -> None:
        """Called when a step ends or a request arrives."""


class Replica:
    """One engine behind its routes. Used from one event loop.

    Args:
        folder: of the model, for routers that ask where its tokenizer is.
        ears: told of what happens, where our gateway listens.
        gap_s: where this is given no engine is emulated: each answer's first token comes at once,
            and one each `gap_s` after it.
    """

    def __init__(
        self, machine: Machine, folder: str, ears: Ears | None = None, gap_s: float | None = None
    ) -> None:
        self._machine, self._folder, self._ears, self._gap_s = machine, folder, ears, gap_s
        self.engine = Engine(machine)
        self.pacer = Pacer(self.engine, ears.changed if ears else lambda: None)
        self.requests = 0
        self.remember: Callable[[NDArray[np.uint32], list[bytes]], None] | None = None
        """Told the tokens of each prompt, and its blocks."""
        self._routes: dict[str, Callable[[Exchange], None]] = {
            "/v1/completions": self._complete,
            "/tokenize": self._tokenize,
            KEYS_PATH: self._keys,
            "/v1/models": lambda asked: asked.json({"object": "list", "data": [self._card()]}),
            "/health": lambda asked: asked.json({}),
            "/health_generate": lambda asked: asked.json({}),
            "/version": lambda asked: asked.json({"version": "0.29.0"}),
            "/metrics": lambda asked: asked.json({}),
        }
        for path in ("/get_model_info", "/model_info", "/get_server_info", "/server_info"):
            self._routes[path] = lambda asked: asked.json(self._about())

    def stats(self) -> dict[str, Any]:
        """Return JSON-able counts."""
        engine = self.engine
        return {
            "requests": self.requests,
            "prompt_tokens": engine.prompt_tokens,
            "cached_tokens": engine.cached_tokens,
            "busy_s": engine.busy_s,
            "steps": engine.steps,
            "late_s": self.pacer.late_s,
            "lost_s": self.pacer.lost_s,
            "waiting": len(engine.waiting),
            "running": len(engine.running),
        }

    def handle(self, asked: Exchange) -> None:
        """Answer a request."""
        route = self._routes.get(asked.path)
        if route is None:
            asked.json({"error": {"message": f"no route {asked.path}", "code": 404}}, 404)
            return
        try:
            route(asked)
        except (msgspec.DecodeError, ValueError) as error:
            asked.json({"error": {"message": str(error), "code": 400}}, 400)

    def request(
        self, tokens: NDArray[np.uint32], answer: int, emit: Callable[[int], None]
    ) -> Request:
        """Return the engine's form of a request."""
        keys = hash_prompt(tokens, self._machine.block_tokens, ROOT)
        if self.remember is not None:
            self.remember(tokens, keys)
        return Request(prompt=len(tokens), keys=keys, answer=answer, emit=emit)

    def _card(self) -> dict[str, Any]:
        return {
            "id": MODEL,
            "object": "model",
            "created": 1750000000,
            "owned_by": "emulated",
            "root": self._folder,
            "max_model_len": 200_000,
        }

    def _about(self) -> dict[str, Any]:
        return {
            "model_path": self._folder,
            "tokenizer_path": self._folder,
            "served_model_name": MODEL,
            "is_generation": True,
            "dp_size": 1,
            "version": "0.29.0",
        }

    def _keys(self, asked: Exchange) -> None:
        body = _decode_keys(asked.body).body
        tokens = tokens_of(body.prompt)
        hashes = hash_prompt(tokens, self._machine.block_tokens, ROOT)
        # A key is the last 8 bytes of the hash as a number, told in little-endian.
        keys = b"".join(key[:-9:-1] for key in hashes)
        asked.json(
            {
                "keys": base64.b64encode(keys).decode(),
                "prompt_tokens": len(tokens),
                "max_tokens": body.max_tokens,
                "local_only": None,
            }
        )

    def _tokenize(self, asked: Exchange) -> None:
        """For vllm-router, which asks every engine for every request."""
        tokens = tokens_of(_decode(asked.body).prompt)
        asked.json({"count": len(tokens), "max_model_len": 200_000, "tokens": tokens.tolist()})

    def _complete(self, asked: Exchange) -> None:
        body = _decode(asked.body)
        self.requests += 1
        plan = asked.headers.get(b"x-headrace-plan")
        if plan is not None and self._ears is not None:
            self._ears.heard(plan)
        answer = max(1, body.max_tokens)
        if self._gap_s is not None:
            asked.stream()
            self._spaced(asked, answer, asyncio.get_running_loop().time())
            return

        def emit(emitted: int) -> None:
            if not body.stream:
                if emitted == answer:
                    asked.json(self._whole(answer))
            elif emitted < answer:
                asked.write(_TOKEN)
            else:
                asked.write(_LAST)
                asked.finish()

        request = self.request(tokens_of(body.prompt), answer, emit)
        asked.on_lost = lambda: self.engine.abort(request)
        self.pacer.submit(request)
        if body.stream:
            asked.stream()

    def _spaced(self, asked: Exchange, left: int, at_s: float) -> None:
        """An answer without an engine."""
        if left == 1:
            asked.write(_LAST)
            asked.finish()
            return
        assert self._gap_s is not None
        asked.write(_TOKEN)
        at_s += self._gap_s
        loop = asyncio.get_running_loop()
        timer = loop.call_at(at_s, self._spaced, asked, left - 1, at_s)
        asked.on_lost = timer.cancel

    def _whole(self, answer: int) -> dict[str, Any]:
        choice = {"index": 0, "text": ANSWER * answer, "logprobs": None, "finish_reason": "length"}
        return {
            "id": "cmpl-0123456789abcdef",
            "object": "text_completion",
            "created": 1750000000,
            "model": MODEL,
            "choices": [choice],
            "usage": {"prompt_tokens": 0, "completion_tokens": answer, "total_tokens": answer},
        }
