"""Adds the API layer to vLLM's application.

`tests/unit/test_contracts_decode.py` checks the parts of vLLM that are used here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from starlette.middleware import Middleware

from headrace_decode.apis.checks import Abilities
from headrace_decode.apis.middleware import ApiMiddleware
from headrace_engine.serving.validation import bound_validation


def add_api_layer(
    app: Any, why_no_tools: str | None = None, engine_died: Callable[[], bool] = lambda: False
) -> None:
    """Make an application check requests and complete answers; it must serve no request yet.

    Args:
        app: vLLM's application over an engine.
        why_no_tools: why tool calls cannot be parsed; None if they can.
        engine_died: returns whether the engine died.
    """
    bound_validation(app)
    config = app.state.vllm_config
    abilities = Abilities(
        why_no_tools=why_no_tools,
        tool_server=bool(app.state.args.tool_server),
        priorities=config.scheduler_config.policy == "priority",
    )
    add_middleware(app, ApiMiddleware, abilities=abilities, engine_died=engine_died)


def add_middleware(app: Any, middleware: Any, **settings: Any) -> None:
    """Add a middleware like `app.add_middleware`, after the stack was built.

    `app.add_middleware` itself refuses, since vLLM's `build_app` has built the stack of middleware
    although no request was served.
    """
    app.user_middleware.insert(0, Middleware(middleware, **settings))
    app.middleware_stack = app.build_middleware_stack()
