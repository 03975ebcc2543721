"""Asks a started engine which techniques it cannot do, so that no client is offered them.

Our workers have a method `headrace_unsupported`. It returns, by name, why a technique cannot be
done.
"""

from __future__ import annotations

from typing import Any


async def unsupported(llm: Any) -> dict[str, str]:
    """Return the techniques that the engine cannot do, by name, with the reasons.

    Args:
        llm: `AsyncLLM`.

    Raises:
        Exception: the engine's workers do not answer.
    """
    answers = await llm.collective_rpc("headrace_unsupported")
    return {name: why for answer in reversed(answers) for name, why in answer.items()}
