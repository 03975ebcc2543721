"""Parts of vLLM's frontend (`AsyncLLM`) beyond its documented methods.

`tests/unit/test_contracts_decode.py` and `test_contracts_resume.py` pin what is used here.
"""

from __future__ import annotations

from typing import Any

from vllm.renderers.hf import HfRenderer
from vllm.renderers.registry import RENDERER_REGISTRY
from vllm.v1.engine.async_llm import AsyncLLM

__all__ = ["RENDERER_REGISTRY", "HfRenderer"]


def skip_grammar_parsing(llm: AsyncLLM) -> None:
    """Keep a frontend from parsing the grammars of requests on its event loop."""
    llm.input_processor.structured_outputs_config = None  # type: ignore[assignment]


def request_state(llm: AsyncLLM, request_id: str) -> Any | None:
    """Return the frontend's state of a request that the engine has; None without one."""
    return llm.output_processor.request_states.get(request_id)


def cache_tokens(config: Any) -> float:
    """Return the number of tokens that fit into an engine's KV cache; infinity if unknown."""
    cache = config.cache_config
    return cache.num_gpu_blocks * cache.block_size if cache.num_gpu_blocks else float("inf")
