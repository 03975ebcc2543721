"""Parts of vLLM's frontend (`AsyncLLM`) beyond its documented methods.

`tests/unit/test_contracts_decode.py`, `test_contracts_resume.py` and `test_contracts_adapters.py`
pin what is used here.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from typing import Any
from weakref import WeakMethod

from vllm.lora.request import LoRARequest
from vllm.renderers.hf import HfRenderer
from vllm.renderers.registry import RENDERER_REGISTRY
from vllm.v1.engine.async_llm import AsyncLLM

from headrace_engine.adapters.registry import AdapterVersion
from headrace_engine.adapters.sources import AdapterError
from headrace_engine.kv_groups import BlockUse

__all__ = ["RENDERER_REGISTRY", "HfRenderer"]

SendRequest = Callable[[Any], Awaitable[None]]


def intercept_requests(
    llm: AsyncLLM, submit: Callable[[Any, SendRequest], Awaitable[None]]
) -> None:
    """Have a frontend pass each request for its engine to `submit`.

    vLLM sends the choices of a request to the engine one after the other, in the order of their
    indices. By then its output processor has all of them. A client's cancellation of the request
    reaches `submit`.

    Args:
        submit: a method of `llm`. It gets the request of one choice (vLLM's `EngineCoreRequest`),
            and the function that sends a request to the engine.
    """
    core: Any = llm.engine_core
    send: SendRequest = core.add_request_async
    # A task of the engine's client runs until the frontend is collected, so the client must not
    # hold the frontend.
    method = WeakMethod(submit)

    async def add_request_async(request: Any) -> None:
        found = method()
        assert found is not None, "the caller holds the frontend"
        await found(request, send)

    core.add_request_async = add_request_async


def skip_grammar_parsing(llm: AsyncLLM) -> None:
    """Keep a frontend from parsing the grammars of requests on its event loop."""
    llm.input_processor.structured_outputs_config = None  # type: ignore[assignment]


def request_state(llm: AsyncLLM, request_id: str) -> Any | None:
    """Return the frontend's state of a request that the engine has; None without one."""
    return llm.output_processor.request_states.get(request_id)


def cache_tokens(config: Any, use: BlockUse) -> float:
    """Return the number of one request's tokens that fit into an engine's KV cache; infinity if
    unknown.

    Args:
        use: blocks that a request takes.
    """
    cache = config.cache_config
    if not cache.num_gpu_blocks:
        return math.inf
    positions = use.positions(cache.num_gpu_blocks)
    return positions if math.isinf(positions) else int(positions) * int(cache.block_size)


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
