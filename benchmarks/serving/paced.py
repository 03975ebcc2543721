"""A replica that streams tokens at a GPU's pace without computing, for the real token paths.

With a real engine on a CPU a step takes 50 to 200 ms, so a token path's milliseconds are lost in
the noise. Here the first token comes at once and the others follow `GAP_S` apart, so only the
path's time remains. The relay is Headrace's own gateway; direct streaming is Ray's own HAProxy and
request router. There is no classic path here: it calls methods of a whole LLM server.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

from ray import serve
from ray.serve.deployment import Application

from benchmarks.serving.arms import MODEL_ID
from headrace.config import HeadraceConfig
from headrace.gateway.ingress.http_server import Server, serve_gateway

GAP_S = 0.02
_JSON = [(b"content-type", b"application/json")]
_STREAM = [(b"content-type", b"text/event-stream; charset=utf-8")]
_EVENT = (
    b'data: {"id":"chatcmpl-0123456789abcdef","object":"chat.completion.chunk","created":1750000000'
    b',"model":"bench-model","choices":[{"index":0,"delta":{"content":" token"},"logprobs":null,'
    b'"finish_reason":null}]}\n\n'
)


async def answer(scope: Any, receive: Any, send: Any) -> None:
    """ASGI: a model list, and completions of `max_tokens` tokens."""
    if scope["type"] != "http":
        return
    if scope["method"] != "POST":
        body = json.dumps({"object": "list", "data": [{"id": MODEL_ID}]}).encode()
        await send({"type": "http.response.start", "status": 200, "headers": _JSON})
        await send({"type": "http.response.body", "body": body})
        return
    body, more = b"", True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    tokens = int(json.loads(body)["max_tokens"])
    await send({"type": "http.response.start", "status": 200, "headers": _STREAM})
    loop = asyncio.get_running_loop()
    began = loop.time()
    for token in range(tokens):
        await asyncio.sleep(max(0.0, began + token * GAP_S - loop.time()))
        await send({"type": "http.response.body", "body": _EVENT, "more_body": True})
    usage = {"prompt_tokens": 50, "completion_tokens": tokens}
    last = b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\n"
    await send({"type": "http.response.body", "body": last + b"data: [DONE]\n\n"})


class PacedReplica:
    """Stands where the decode replica stands, in either path."""

    async def __init__(self, relayed: bool):  # type: ignore[misc]  # Serve awaits it
        self._listener: Server | None = None
        if relayed:
            self._listener = await serve_gateway(answer, "127.0.0.1", 0)

    async def __serve_build_asgi_app__(self) -> Any:
        return answer

    async def headrace_replica(self) -> dict[str, Any]:
        """Return the facts that the gateway requests from a decode replica."""
        return {
            "replica_id": serve.get_replica_context().replica_id.unique_id,
            "url": f"http://127.0.0.1:{self._listener.port}" if self._listener else None,
            "running": 0,
            "waiting": 0,
        }


def build_paced_app(config: HeadraceConfig) -> Application:
    """Return the app of one token path, `relay` or `direct`, in front of a `PacedReplica`."""
    relayed = config.token_path == "relay"
    options = {"name": "decode", "max_ongoing_requests": 10_000}
    if relayed:
        from headrace.gateway.deployment import GatewayServer
        from headrace.observability import ProcessSetup

        replica = serve.deployment(PacedReplica).options(**options).bind(True)
        setup = ProcessSetup(**config.observability.model_dump())
        gateway = serve.deployment(serve.ingress()(GatewayServer))
        return gateway.options(name="gateway", max_ongoing_requests=10_000).bind(
            replica, replica, config.gateway, "token", MODEL_ID, setup
        )
    from ray.llm._internal.serve.core.ingress.router import LLMRouter
    from ray.serve.config import RequestRouterConfig
    from ray.serve.experimental.round_robin_router import RoundRobinRouter

    from headrace_engine.ray.llm import with_ingress_request_router

    routing = RequestRouterConfig(request_router_class=RoundRobinRouter)
    ingress = serve.deployment(serve.ingress()(PacedReplica))
    replica = ingress.options(**options, request_router_config=routing).bind(False)
    router = serve.deployment(LLMRouter, max_ongoing_requests=1000)
    bound = router.bind(server=replica, llm_config=None, base_model_id=None)
    return with_ingress_request_router(replica, bound)
