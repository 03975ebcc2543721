"""What our renderer takes from vLLM's is there, in the same shape."""

from __future__ import annotations

import inspect

from vllm.renderers import renderer_from_config
from vllm.renderers.hf import HfRenderer
from vllm.v1.engine.async_llm import AsyncLLM

MEND = "mend decode/headrace_decode/rendering/long_text_renderer.py"


def test_a_long_text_is_tokenised_by_the_renderer_that_is_registered() -> None:
    assert "params" in inspect.signature(HfRenderer.tokenize_prompt_async).parameters, MEND
    for name in ("tokenize_prompts_async", "_tokenize_singleton_prompt_async"):
        source = inspect.getsource(getattr(HfRenderer, name))
        wanted = "self.tokenize_prompt_async(" if "prompts" in name else '"prompt_token_ids" not in'
        assert wanted in source, MEND
    source = inspect.getsource(AsyncLLM.__init__)
    assert "self.renderer = renderer = renderer_from_config(" in source, MEND
    source = inspect.getsource(renderer_from_config)
    assert "RENDERER_REGISTRY.load_renderer(" in source, MEND
