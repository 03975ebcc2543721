"""Reads which LoRA adapters administrators have added, also through other gateways."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

from headrace.gateway.backend import ModelBackend
from headrace.gateway.models.adapter_names import AdapterNames

logger = logging.getLogger("headrace.gateway")

MIN_INTERVAL_S = 1.0
"""Least time between two reads, however many unknown names clients send."""


class AddedNames:
    """Reader of the added adapters' names, for one event loop.

    Args:
        names: receives the names.
        backends: the models' replicas, by model.
    """

    def __init__(self, names: AdapterNames, backends: Mapping[str, ModelBackend]) -> None:
        self._names, self._backends = names, backends
        self._next: asyncio.Task[None] | None = None
        self._read_s = float("-inf")

    async def read(self) -> None:
        """Read the names of all adapters that were added before this call.

        All that wait share the next read, which begins `MIN_INTERVAL_S` after the last one or
        later.
        """
        if self._next is None:
            self._next = asyncio.create_task(self._read())
        await asyncio.shield(self._next)

    def close(self) -> None:
        """Cancel the read that has not begun."""
        if self._next is not None:
            self._next.cancel()

    async def _read(self) -> None:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(self._read_s + MIN_INTERVAL_S - loop.time())
        self._read_s, self._next = loop.time(), None  # who comes from now on needs another read
        models = self._names.models
        added = await asyncio.gather(
            *(self._backends[model].added_adapters() for model in models), return_exceptions=True
        )
        for model, sources in zip(models, added, strict=True):
            if isinstance(sources, BaseException):
                logger.warning("cannot read the added LoRA adapters of %s: %r", model, sources)
            else:
                self._names.set_added(model, sources)
