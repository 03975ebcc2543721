"""Asks a started engine which techniques it cannot do, so that no client is offered them.

Workers of ours have a method `headrace_unsupported`: why a technique cannot be done, by its name.
"""

from __future__ import annotations

from typing import Any


async def unsupported(llm: Any) -> dict[str, str]:
    """Return why a technique cannot be done, by its name; less those that can be.

    Args:
        llm: `AsyncLLM`.

    Raises:
        Exception: the engine's workers do not tell.
    """
    answers = await llm.collective_rpc("headrace_unsupported")
    return {name: why for answer in reversed(answers) for name, why in answer.items()}
