"""A request of vLLM's serving layer, and whether another replica can prefill it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from headrace_decode.techniques import COMPRESSION, keep_ratio_in
from headrace_engine.adapters.snapshots import snapshot_digest
from headrace_engine.kv_transfer.media import has_media, why_not_sent


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
    def has_media(self) -> bool:
        """Whether the prompt holds images, sound or video."""
        return has_media(self.prompt)

    @property
    def is_text(self) -> bool:
        """Whether the prompt is only text."""
        return (
            isinstance(self.prompt, dict)
            and self.prompt.get("type", "token") == "token"
            and not self.has_media
        )

    @property
    def is_plain(self) -> bool:
        """Whether the prompt is only text, for the model without an adapter."""
        return self.is_text and self.adapter is None


def why_local(
    request: EngineRequest,
    cache_tokens: float = math.inf,
    compresses_prompts: bool = False,
    identifies_media: bool = True,
) -> str | None:
    """Return why a request cannot be prefilled at another replica, or None if it can.

    Args:
        cache_tokens: tokens that fit into the KV cache of the engine that decodes.
        compresses_prompts: whether that engine drops KV of prompts while it computes them.
        identifies_media: whether that engine names media by their content.
    """
    prompt, params, token_ids = request.prompt, request.params, request.token_ids
    if not token_ids:
        return "the prompt is not plain token ids"
    if prompt.get("type", "token") not in ("token", "multimodal"):
        return "the prompt is not plain token ids"
    if request.has_media and (why := _why_media_stay(prompt, identifies_media)) is not None:
        return why
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


def _why_media_stay(prompt: Any, identifies_media: bool) -> str | None:
    if prompt.get("multi_modal_data"):
        return "the prompt's media are not processed yet"
    if not identifies_media:
        return "the engine that decodes numbers media and does not name them by their content"
    return why_not_sent(prompt)
