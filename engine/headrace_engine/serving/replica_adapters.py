"""An engine's adapters as its replica runs them: made at the start, and told of added adapters."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

from headrace_engine.adapters.middleware import AdapterMiddleware
from headrace_engine.adapters.registry import AdapterRegistry
from headrace_engine.adapters.settings import AdapterSettings
from headrace_engine.adapters.snapshots import Snapshots
from headrace_engine.adapters.sources import AdapterError
from headrace_engine.serving.added_adapters import AddedAdapters
from headrace_engine.vllm.llm import VllmAdapters
from headrace_engine.vllm.openai_app import add_middleware, serving_models

logger = logging.getLogger("headrace.engine")

POLL_INTERVAL_S = 5.0
"""Interval in seconds at which a replica reads the added adapters that it was not told of."""


class ReplicaAdapters:
    """The adapters of one replica. Made and used on its event loop.

    Args:
        settings: the configured adapters.
        llm: the frontend of the started engine.
        added: the adapters that administrators have added.
        replica_id: the replica's id.
    """

    def __init__(
        self, settings: AdapterSettings, llm: Any, added: AddedAdapters, replica_id: str
    ) -> None:
        self._snapshots, self._added, self._replica_id = Snapshots(), added, replica_id
        self._engine = VllmAdapters(llm)
        self.registry = AdapterRegistry(settings, self._engine, self._snapshots)

    async def start(self) -> None:
        """Remove old snapshots, and read the configured adapters.

        Raises:
            AdapterError: a configured adapter cannot be used.
        """
        await asyncio.to_thread(self._snapshots.remove_unused)
        await self._read_added()
        for name in self.registry.settings.sources:
            try:
                version = await self.registry.find(name)
                assert version is not None
                async with self.registry.using(version.number):
                    pass
            except AdapterError as error:
                raise AdapterError(f"the LoRA adapter {name!r}: {error}") from None

    def attach(self, app: Any) -> None:
        """Let requests to vLLM's application name adapters; it must serve no request yet."""
        self._engine.models = serving_models(app)
        add_middleware(app, AdapterMiddleware, registry=self.registry)

    async def poll(self) -> None:
        """Read the added adapters for ever, at an interval."""
        while True:
            await asyncio.sleep(POLL_INTERVAL_S)
            await self._read_added()

    async def change(self, sources: Mapping[str, str], name: str | None) -> dict[str, Any]:
        """Set the added adapters, and load one of them.

        Args:
            name: the adapter to load; None to load none.

        Returns:
            The replica's id, and `error` if the adapter cannot be used here.
        """
        registry, answer = self.registry, {"replica_id": self._replica_id}
        if name is not None and (why := registry.why_not_added(name)) is not None:
            return {**answer, "error": why}
        registry.set_added(sources)
        if name is None:
            return answer
        try:
            version = await registry.find(name, now=True)
            if version is not None:
                async with registry.using(version.number):
                    pass
        except AdapterError as error:
            return {**answer, "error": str(error)}
        return answer

    def close(self) -> None:
        """Release the snapshots."""
        self.registry.close()

    async def _read_added(self) -> None:
        try:
            self.registry.set_added(await asyncio.to_thread(self._added.all))
        except Exception as error:
            logger.warning("cannot read the added LoRA adapters: %r", error)
