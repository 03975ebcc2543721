"""A request of vLLM's serving layer, and whether another replica can prefill it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from headrace_decode.techniques import COMPRESSION, keep_ratio_in
from headrace_engine.adapters.snapshots import snapshot_digest


@dataclass(frozen=True)
class EngineRequest:
    """A request as vLLM's serving layer gives it to the engine.

    Attributes:
        prompt, params: vLLM's prompt and its `SamplingParams`.
        options: the other arguments of `AsyncLLM.generate`.
    """

    prompt: Any
    params: Any
    request_id: str
    options: dict[str, Any]

    @property
    def token_ids(self) -> list[int] | None:
        """The prompt's tokens; None if the prompt is not token ids."""
        return self.prompt.get("prompt_token_ids") if isinstance(self.prompt, dict) else None

    @property
    def salt(self) -> str:
        """The prompt's cache salt; empty without one."""
        return (self.prompt.get("cache_salt") if isinstance(self.prompt, dict) else None) or ""

    @property
    def adapter(self) -> Any:
        """vLLM's `LoRARequest`; None without an adapter."""
        return self.options.get("lora_request")

    @property
    def adapter_digest(self) -> str:
        """Digest of the adapter's content; empty without an adapter, or if it is not known."""
        return "" if self.adapter is None else snapshot_digest(self.adapter.lora_path) or ""

    @property
    def is_text(self) -> bool:
        """Whether the prompt is only text."""
        return (
            isinstance(self.prompt, dict)
            and self.prompt.get("type", "token") == "token"
            and not self.prompt.get("multi_modal_data")
        )

    @property
    def is_plain(self) -> bool:
        """Whether the prompt is only text, for the model without an adapter."""
        return self.is_text and self.adapter is None


def why_local(
    request: EngineRequest, cache_tokens: float = math.inf, compresses_prompts: bool = False
) -> str | None:
    """Return why a request cannot be prefilled at another replica, or None if it can.

    Args:
        cache_tokens: tokens that fit into the KV cache of the engine that decodes.
        compresses_prompts: whether that engine drops KV of prompts while it computes them.
    """
    prompt, params, token_ids = request.prompt, request.params, request.token_ids
    if not token_ids:
        return "the prompt is not plain token ids"
    if prompt.get("type", "token") != "token" or prompt.get("multi_modal_data"):
        return "the prompt is multimodal"
    if params.n > 1:
        return "n > 1: the samples share one prompt in the engine that decodes them"
    if params.prompt_logprobs is not None:
        return "prompt log-probabilities come from the engine that prefills"
    if request.adapter is not None and not request.adapter_digest:
        return "the content of the request's LoRA adapter is not known"
    if len(token_ids) > cache_tokens:
        return "the prompt is longer than the cache of the engine that decodes"
    if compresses_prompts and keep_ratio_in(params, COMPRESSION) is not None:
        return "the engine that decodes drops KV while it computes the prompt"
    return None
