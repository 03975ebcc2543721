"""vLLM's configuration of an engine with the tiny Llama, made once a run, and changed copies."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs

from tests.support.tiny import tiny_llama


@cache
def _made() -> VllmConfig:
    arguments = EngineArgs(
        model=str(tiny_llama()),
        dtype="float32",
        max_model_len=4096,
        disable_hybrid_kv_cache_manager=True,
    )
    return arguments.create_engine_config()


def engine_config(**changed: Any) -> Any:
    """A copy, in which fields have other values: `model_config__max_model_len=8192`."""
    config = copy.deepcopy(_made())
    for name, value in changed.items():
        *path, last = name.split("__")
        at = config
        for each in path:
            at = getattr(at, each)
        object.__setattr__(at, last, value)
    return config
