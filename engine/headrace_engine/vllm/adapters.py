"""Loads adapters into a vLLM engine, and lets vLLM's OpenAI application find them by name.

`tests/unit/test_contracts_adapters.py` pins what is used here.
"""

from __future__ import annotations

from typing import Any

from vllm.lora.request import LoRARequest
from vllm.v1.engine.async_llm import AsyncLLM

from headrace_engine.adapters.registry import AdapterVersion
from headrace_engine.adapters.sources import AdapterError


def lora_request(version: AdapterVersion) -> LoRARequest:
    """Return vLLM's form of an adapter."""
    return LoRARequest(version.name, version.number, version.path)


class VllmAdapters:
    """The adapters of a started engine (`registry.AdapterEngine`).

    Args:
        llm: the engine's frontend. Its configuration has a `lora_config`.

    Attributes:
        capacity: number of adapters that the engine keeps.
        models: vLLM's `OpenAIServingModels`, once there is an application.
    """

    def __init__(self, llm: AsyncLLM) -> None:
        config = llm.vllm_config.lora_config
        assert config is not None
        self._llm = llm
        self.capacity = int(config.max_cpu_loras or config.max_loras)
        self.models: Any = None

    async def load(self, version: AdapterVersion) -> None:
        """Have the engine load an adapter between two steps.

        Raises:
            AdapterError: the engine refuses it.
        """
        try:
            await self._llm.add_lora(lora_request(version))
        except Exception as error:
            if self._llm.errored:
                raise
            first = str(error).strip().partition("\n")[0] or type(error).__name__
            raise AdapterError(first) from None

    def offer(self, version: AdapterVersion) -> None:
        """Register an adapter under its name with vLLM's application."""
        if self.models is not None:
            self.models.lora_requests[version.name] = lora_request(version)

    def withdraw(self, name: str) -> None:
        """Remove a name from vLLM's application."""
        if self.models is not None:
            self.models.lora_requests.pop(name, None)


def serving_models(app: Any) -> Any:
    """Return the `OpenAIServingModels` of vLLM's application."""
    return app.state.openai_serving_models
