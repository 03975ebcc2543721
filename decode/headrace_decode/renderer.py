"""vLLM's renderer for Hugging Face tokenizers, with long texts tokenised apart (`longtext`).

It decides only where a prompt is tokenised: a long text by `LongTexts`, any other by vLLM. vLLM
checks the tokens that result, and refuses them, as ever. It is put in place through vLLM's registry
of renderers. Models with another renderer (Mistral's, Kimi's) have all texts tokenised by vLLM.
"""

from __future__ import annotations

import copy
from typing import Any

from vllm.renderers.hf import HfRenderer
from vllm.renderers.registry import RENDERER_REGISTRY

from headrace_decode.longtext import LONG_CHARS, LongTexts

MODE = "hf"


class LongTextRenderer(HfRenderer):
    """As `HfRenderer`."""

    def __init__(self, config: Any, tokenizer: Any) -> None:
        super().__init__(config, tokenizer)
        self._long_texts = LongTexts()
        # A tokenizer must not be used by two threads at once.
        self._apart = copy.deepcopy(tokenizer)

    async def tokenize_prompt_async(self, prompt: Any, params: Any) -> Any:
        """As `HfRenderer`: the same tokens, the same refusals."""
        plain = super().tokenize_prompt_async
        if not _is_long_text(prompt) or params.return_token_offsets:
            return await plain(prompt, params)
        prompt = params.apply_pre_tokenization(self.tokenizer, dict(prompt))
        settings = params.get_encode_kwargs()
        most = None
        if params.truncate_prompt_tokens is None and params.max_input_tokens is not None:
            most = params.max_input_tokens
            settings = {"add_special_tokens": settings["add_special_tokens"]}

        def encode(text: str) -> list[int]:
            return list(self._apart(text, **settings)["input_ids"])

        ids = await self._long_texts.token_ids(prompt["prompt"], most, encode)
        if most is not None:
            ids = ids[: most + 1]  # where vLLM, too, stops to count
        return await plain({**prompt, "prompt_token_ids": list(ids)}, params)

    def shutdown(self) -> None:
        """As `HfRenderer`."""
        self._long_texts.close()
        super().shutdown()


def register() -> None:
    """Have vLLM make this renderer in this process, in place of its own."""
    ours = __name__, LongTextRenderer.__name__
    if RENDERER_REGISTRY.renderers.get(MODE) != ours:
        RENDERER_REGISTRY.register(MODE, *ours)


def _is_long_text(prompt: dict[str, Any]) -> bool:
    text = prompt.get("prompt")
    others = ("prompt_token_ids", "prompt_embeds", "multi_modal_data", "multi_modal_uuids")
    return isinstance(text, str) and len(text) > LONG_CHARS and not any(map(prompt.get, others))
