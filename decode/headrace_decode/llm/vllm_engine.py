"""Ray's vLLM engine around a `PlannedLLM`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from headrace_decode.llm.planned_llm import PlannedLLM, Planning
from headrace_engine.meter import EngineMeter
from headrace_engine.ray.engine import MeteredVLLMEngine


class PlannedVLLMEngine(MeteredVLLMEngine):
    """Ray's vLLM engine around a `PlannedLLM`.

    Args:
        planning: (vLLM config of the started engine, its meter) -> its planning; None for an
            engine that runs each request immediately.
    """

    llm: PlannedLLM

    def __init__(
        self,
        llm_config: Any,
        *,
        planning: Callable[[Any, EngineMeter], Planning] | None = None,
    ) -> None:
        super().__init__(llm_config)
        self.make_llm = PlannedLLM
        if planning is not None:
            self.make_llm = partial(
                PlannedLLM, planning=lambda config: planning(config, self.meter)
            )

    def _start_async_llm_engine(self, *args: Any, **kwargs: Any) -> Any:
        """Start the engine as `MeteredVLLMEngine`, and have its frontend record usage."""
        llm = super()._start_async_llm_engine(*args, **kwargs)
        self.llm.usage_book = self.meter.usage
        return llm

    async def find_left_out(self) -> dict[str, str]:
        """Implement `MeteredVLLMEngine.find_left_out`; withdraw the techniques that the engine does
        not support."""
        found = await super().find_left_out()
        found |= await self.llm.withdraw_unsupported_techniques()
        if (why := self.llm.why_not_resumable) is not None:
            found["resume"] = why
        return found
