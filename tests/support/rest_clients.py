"""Clients of the servers of `rest_servers`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import httpx

from tests.support.rest_servers import REASONING, TOKEN, rest_servers

ASKED_AGAIN = 4


@dataclass
class Servers:
    """Clients of both."""

    vllm: httpx.Client
    gateway: httpx.Client
    replica: httpx.Client
    reasoning: dict[str, httpx.Client]
    """Gateways of replicas that tell reasoning from answers, by the kind of their parser."""

    def ask(self, path: str, body: dict[str, Any] | None) -> tuple[httpx.Response, httpx.Response]:
        """The answers of vLLM's server and of the gateway. A grammar whose trial a busy machine
        did not finish is answered with 503, "ask again", and is asked again."""
        method = "GET" if body is None else "POST"
        headers = {"x-request-id": "0123456789abcdef"}

        def answer(client: httpx.Client) -> httpx.Response:
            for _ in range(ASKED_AGAIN):
                reply = client.request(method, path, json=body, headers=headers)
                if reply.status_code != HTTPStatus.SERVICE_UNAVAILABLE:
                    break
            return reply

        return answer(self.vllm), answer(self.gateway)

    def keys(self, target: str, body: Any, tenant: str | None = None) -> dict[str, Any]:
        """What the replica tells of a request's prompt."""
        headers = {"x-headrace-internal": TOKEN}
        if tenant is not None:
            headers["x-headrace-tenant"] = tenant
        asked = {"target": target, "body": body}
        told = self.replica.post("/headrace/internal/keys", json=asked, headers=headers)
        assert told.status_code == 200, told.text[:500]
        return dict(told.json())

    def tokens_read(self) -> int:
        """Prompt tokens that the engine has taken in since it started."""
        metrics = self.vllm.get("/metrics").text
        return int(float(re.findall(r"^vllm:prompt_tokens_total{.*} (\S+)$", metrics, re.M)[0]))


@contextmanager
def rest_clients(model: str) -> Iterator[Servers]:
    """Clients of the servers, while these run.

    Args:
        model: folder of the model.
    """
    with rest_servers(model) as urls, ExitStack() as stack:
        plain, ours, port, *reasoning = [
            stack.enter_context(httpx.Client(base_url=url, timeout=150)) for url in urls
        ]
        yield Servers(plain, ours, port, dict(zip(REASONING, reasoning, strict=True)))
