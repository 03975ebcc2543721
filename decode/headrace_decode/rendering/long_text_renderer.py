"""vLLM's renderer for Hugging Face tokenizers, with long texts on their own thread (`long_texts`).

It decides only where a prompt is tokenised: `LongTextTokenizer` tokenises long texts, from segments
that it knows (`segment_tokenizer`), and vLLM all others. vLLM checks and refuses the resulting
tokens as usual. The renderer is installed through vLLM's registry of renderers. For models with
another renderer (Mistral's, Kimi's), vLLM tokenises all texts.
"""

from __future__ import annotations

import copy
from typing import Any

from headrace_decode.http.internal_port import TENANT
from headrace_decode.rendering.long_texts import LONG_CHARS, LongTextTokenizer
from headrace_decode.rendering.segment_tokenizer import SegmentTokenizer
from headrace_engine.vllm.llm import RENDERER_REGISTRY, HfRenderer

MODE = "hf"


class LongTextRenderer(HfRenderer):
    """An `HfRenderer` that tokenises long texts on their own thread."""

    def __init__(self, config: Any, tokenizer: Any) -> None:
        super().__init__(config, tokenizer)
        self._long_texts = LongTextTokenizer()
        # Two threads must not use a tokenizer at the same time.
        self._own_tokenizer = copy.deepcopy(tokenizer)
        self._segments: SegmentTokenizer | None = None  # made by the first long text, on the thread

    async def tokenize_prompt_async(self, prompt: Any, params: Any) -> Any:
        """Tokenise a prompt to the same tokens, with the same refusals, as `HfRenderer`."""
        plain = super().tokenize_prompt_async
        if not _is_long_text(prompt) or params.return_token_offsets:
            return await plain(prompt, params)
        prompt = params.apply_pre_tokenization(self.tokenizer, dict(prompt))
        settings = params.get_encode_kwargs()
        max_tokens = None
        if params.truncate_prompt_tokens is None and params.max_input_tokens is not None:
            max_tokens = params.max_input_tokens
            settings = {"add_special_tokens": settings["add_special_tokens"]}

        owner = TENANT.get()

        def encode(text: str) -> list[int]:
            if "truncation" in settings:
                return list(self._own_tokenizer(text, **settings)["input_ids"])
            return self._segment_tokenizer.token_ids(text, settings["add_special_tokens"], owner)

        ids = await self._long_texts.token_ids(prompt["prompt"], max_tokens, encode)
        if max_tokens is not None:
            ids = ids[: max_tokens + 1]  # vLLM stops counting there, too
        return await plain({**prompt, "prompt_token_ids": list(ids)}, params)

    @property
    def _segment_tokenizer(self) -> SegmentTokenizer:
        """The tokenizer of segments; used on the thread only."""
        if self._segments is None:
            tokenizer = self._own_tokenizer
            added = tokenizer.added_tokens_decoder if tokenizer.is_fast else {}

            def encode(text: str, add_special_tokens: bool) -> list[int]:
                return list(tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"])

            self._segments = SegmentTokenizer(encode, added)
        return self._segments

    def shutdown(self) -> None:
        """Close the thread for long texts, then shut down as `HfRenderer` does."""
        self._long_texts.close()
        super().shutdown()


def register() -> None:
    """Make vLLM use this renderer in this process instead of its own."""
    ours = __name__, LongTextRenderer.__name__
    if RENDERER_REGISTRY.renderers.get(MODE) != ours:
        RENDERER_REGISTRY.register(MODE, *ours)


def _is_long_text(prompt: dict[str, Any]) -> bool:
    text = prompt.get("prompt")
    others = ("prompt_token_ids", "prompt_embeds", "multi_modal_data", "multi_modal_uuids")
    return isinstance(text, str) and len(text) > LONG_CHARS and not any(map(prompt.get, others))
