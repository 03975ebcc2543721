"""A value that is made at most once in a while, for any number of callers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from time import monotonic
from typing import Generic, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class Recent(Generic[P, T]):
    """A function whose last value is shared while it is recent. Use it from one event loop.

    Callers wait while the value is made, and a cancelled caller does not stop it.

    Args:
        make: makes the value, from the arguments of the caller that finds none or an old one.
        max_age_s: seconds from the beginning of its making until it is made again.
    """

    def __init__(self, make: Callable[P, Awaitable[T]], max_age_s: float) -> None:
        self._make, self._max_age_s = make, max_age_s
        self._made: tuple[float, asyncio.Future[T]] | None = None

    async def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        """Return the value, which is at most `max_age_s` old."""
        if self._made is None or monotonic() - self._made[0] > self._max_age_s:
            self._made = monotonic(), asyncio.ensure_future(self._make(*args, **kwargs))
        return await asyncio.shield(self._made[1])
