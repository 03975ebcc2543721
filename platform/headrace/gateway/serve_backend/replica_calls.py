"""Calls of a method on all replicas of a deployment."""

from __future__ import annotations

import logging
from typing import Any

from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle

logger = logging.getLogger("headrace.gateway")

BROADCAST_TIMEOUT_S = 5.0


async def broadcast(handle: DeploymentHandle, method: str, *args: Any) -> list[Any]:
    """Call `ask_all`, but return no answers if that fails."""
    try:
        return await ask_all(handle, method, *args)
    except Exception as error:
        logger.debug("broadcast %s: %s", method, error)
        return []


async def ask_each(
    handle: DeploymentHandle, method: str, *args: Any, timeout_s: float | None
) -> list[dict[str, Any]]:
    """Call a method on all replicas; a replica that fails gives an answer with `error`.

    Replicas that answer None are left out.
    """
    try:
        answers = await handle.broadcast(method, *args).results_async(
            timeout_s=timeout_s, return_exceptions=True
        )
    except DeploymentUnavailableError:
        return []
    return [
        {"replica_id": "", "error": f"a replica failed: {answer}"}
        if isinstance(answer, BaseException)
        else dict(answer)
        for answer in answers
        if answer is not None
    ]


async def ask_all(
    handle: DeploymentHandle,
    method: str,
    *args: Any,
    timeout_s: float | None = BROADCAST_TIMEOUT_S,
) -> list[Any]:
    """Call a method on all replicas; return the answers of those that gave one."""
    answers = await handle.broadcast(method, *args).results_async(
        timeout_s=timeout_s, return_exceptions=True
    )
    return [answer for answer in answers if not isinstance(answer, BaseException)]
