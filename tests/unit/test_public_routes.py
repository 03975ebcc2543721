"""Which of vLLM's routes clients may use: those of its text generation APIs, and no other."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from fastapi import FastAPI, WebSocket
from fastapi.routing import APIRoute
from ray.serve.llm import LLMConfig

from headrace_decode.http.public_routes import Route, api_of, keep_public_routes, public_routes
from scripts.generate.rest_page import page

ROOT = Path(__file__).parents[2]
OPENAI = "vllm.entrypoints.openai.chat_completion.api_router"


@pytest.fixture(autouse=True)
def log_levels() -> Iterator[None]:
    """Logs as before: vLLM's application silences the whole process."""
    root = logging.getLogger()
    before = [(each, each.level) for each in (root, *root.handlers)]
    yield
    for each, level in before:
        each.setLevel(level)


@pytest.mark.parametrize(
    ("module", "api"),
    [
        (OPENAI, "openai"),
        ("vllm.entrypoints.openai.completion.api_router", "openai"),
        ("vllm.entrypoints.openai.models.api_router", "openai"),
        ("vllm.entrypoints.openai.responses.api_router", "responses"),
        ("vllm.entrypoints.anthropic.api_router", "anthropic"),
        ("vllm.entrypoints.generate.generative_scoring.api_router", "openai"),
        ("vllm.entrypoints.generate.structured_decisions.api_router", "openai"),
        ("vllm.entrypoints.serve.tokenize.api_router", "openai"),
        ("vllm.entrypoints.scale_out.render.api_router", "openai"),
        ("vllm.entrypoints.scale_out.derender.api_router", "openai"),
        ("vllm.entrypoints.scale_out.token_in_token_out.api_router", None),
        ("vllm.entrypoints.scale_out.factories", None),
        ("vllm.entrypoints.serve.dev.sleep.api_router", None),
        ("vllm.entrypoints.serve.lora.api_router", None),
        ("vllm.entrypoints.serve.instrumentator.health", None),
        ("vllm.entrypoints.openai.api_server", None),
        ("vllm.entrypoints.openai.new.deeper.api_router", None),
        ("vllm.entrypoints.something_new.api_router", None),
        ("vllm_plugin.entrypoints.openai.chat.api_router", None),
        ("evil.vllm.entrypoints.anthropic.api_router", None),
        ("", None),
    ],
)
def test_a_handler_is_public_by_the_module_that_defines_it(module: str, api: str | None) -> None:
    assert api_of(module) == api


def app_with(*routes: tuple[str, str, str]) -> FastAPI:
    """An application with handlers at (method, path), as if they were defined in a module."""
    app = FastAPI()
    for method, path, module in routes:

        async def handler() -> None: ...

        handler.__module__ = module
        app.add_api_route(path, handler, methods=[method])
    return app


def test_what_is_not_public_is_removed_and_health_stays() -> None:
    app = app_with(
        ("POST", "/v1/chat/completions", OPENAI),
        ("POST", "/sleep", "vllm.entrypoints.serve.dev.sleep.api_router"),
        ("POST", "/plugin", "a_plugin"),
        ("GET", "/health", "vllm.entrypoints.serve.instrumentator.health"),
        ("GET", "/v1/models/{model:path}", "ray.llm.server"),
    )

    @app.websocket("/v1/realtime")
    async def realtime(socket: WebSocket) -> None: ...

    app.mount("/metrics", FastAPI())
    app.mount("/files", FastAPI())
    keep_public_routes(app)
    left = {getattr(route, "path", "") for route in app.routes}
    assert left >= {"/v1/chat/completions", "/health", "/metrics", "/openapi.json"}
    assert not left & {"/sleep", "/plugin", "/v1/realtime", "/files"}
    assert public_routes(app) == [Route("POST", "/v1/chat/completions", takes_json=False)]


def test_a_path_that_may_hold_slashes_in_a_value_is_not_public() -> None:
    app = app_with(("GET", "/v1/files/{name:path}", OPENAI), ("GET", "/v1/files/{name}", OPENAI))
    keep_public_routes(app)
    assert [route.path for route in app.routes if isinstance(route, APIRoute)] == [
        "/v1/files/{name}"
    ]


VLLM_OFFERS = {
    "POST /detokenize": "openai",
    "POST /generative_scoring": "openai",
    "POST /tokenize": "openai",
    "POST /v1/chat/completions": "openai",
    "POST /v1/chat/completions/batch": "openai",
    "POST /v1/chat/completions/derender": "openai",
    "POST /v1/chat/completions/render": "openai",
    "POST /v1/completions": "openai",
    "POST /v1/completions/derender": "openai",
    "POST /v1/completions/render": "openai",
    "POST /v1/messages": "anthropic",
    "POST /v1/messages/count_tokens": "anthropic",
    "POST /v1/messages/render": "openai",
    "GET /v1/models": "openai",
    "POST /v1/responses": "responses",
    "POST /v1/responses/render": "openai",
    "GET /v1/responses/{response_id}": "responses",
    "POST /v1/responses/{response_id}/cancel": "responses",
    "POST /v1/systemone": "openai",
}
NO_BODY = ("GET /v1/models", "GET /v1/responses/{response_id}")
NO_BODY += ("POST /v1/responses/{response_id}/cancel",)


def test_of_vllms_own_application_with_all_its_switches_only_these_are_public(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An upgrade of vLLM that moves or adds a route shows here: look at it, then mend the list."""
    from headrace_engine.vllm.openai_app import application_without_engine

    for switch in ("VLLM_SERVER_DEV_MODE", "VLLM_ALLOW_RUNTIME_LORA_UPDATING"):
        monkeypatch.setenv(switch, "1")
    app = application_without_engine()
    paths = {getattr(route, "path", "") for route in app.routes}
    assert {"/sleep", "/collective_rpc", "/pause", "/v1/load_lora_adapter"} <= paths
    assert {"/kv_event_sources", "/inference/v1/generate"} <= paths
    offered = {f"{route.method} {route.path}": route for route in public_routes(app)}
    assert {name: route.api for name, route in offered.items()} == VLLM_OFFERS
    assert {name for name, route in offered.items() if not route.takes_json} == set(NO_BODY)
    keep_public_routes(app)
    left = {getattr(route, "path", "") for route in app.routes}
    kept = {"/health", "/load", "/version", "/metrics", "/openapi.json", "/docs", "/redoc"}
    assert left == {name.partition(" ")[2] for name in VLLM_OFFERS} | kept | {
        "/docs/oauth2-redirect"
    }


def test_the_rest_page_is_current() -> None:
    page_now = (ROOT / "docs" / "rest.md").read_text("utf-8")
    assert page_now == page(), "run: python -m scripts.generate"


def test_vllms_store_of_responses_stays_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no bound, knows no tenants, and lies in one replica."""
    from vllm import envs

    from headrace_decode.http import vllm_environment

    monkeypatch.setenv(vllm_environment.RESPONSES_STORE, "1")
    assert envs.VLLM_ENABLE_RESPONSES_API_STORE
    vllm_environment.without_responses_store()
    assert not envs.VLLM_ENABLE_RESPONSES_API_STORE


async def test_a_decode_replica_serves_vllms_public_routes_and_rays_model_route() -> None:
    from headrace_decode.server import DecodeServer
    from headrace_engine.vllm.openai_app import application_without_engine

    async def build_asgi_app() -> FastAPI:
        app = application_without_engine()
        scheduling = SimpleNamespace(policy="fcfs")
        app.state.vllm_config = SimpleNamespace(scheduler_config=scheduling, watermark_config=None)
        return app

    replica = DecodeServer.__new__(DecodeServer)
    replica.engine = SimpleNamespace(
        build_asgi_app=build_asgi_app,
        parsers=SimpleNamespace(why_no_tools=None),
        meter=SimpleNamespace(usage=None),
    )
    replica._llm_config = LLMConfig(model_loading_config={"model_id": "m", "model_source": "m"})
    app = await replica.__serve_build_asgi_app__()
    assert {f"{route.method} {route.path}" for route in public_routes(app)} == set(VLLM_OFFERS)
    paths = {getattr(route, "path", "") for route in app.routes}
    assert "/v1/models/{model:path}" in paths
    assert not paths & {"/scale_elastic_ep", "/inference/v1/generate", "/invocations"}
    assert "/kv_event_sources" not in paths
