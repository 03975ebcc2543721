"""Long texts get the tokens and the refusals of vLLM's own renderer."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from benchmarks.hostile.attacks import MEGABYTE, TROUBLE
from headrace_decode.http.internal_port import TENANT
from headrace_decode.rendering.long_texts import LONG_CHARS
from tests.support.tiny import POSITIONS, tiny_llama

Renderers = tuple[Any, Any]


@pytest.fixture(scope="module")
def renderers() -> Iterator[Renderers]:
    """vLLM's, and one that has long texts tokenised apart."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.renderers import renderer_from_config

    from headrace_decode.rendering.long_text_renderer import LongTextRenderer

    config = EngineArgs(model=str(tiny_llama()), dtype="float32").create_engine_config()
    plain = renderer_from_config(config)
    ours = LongTextRenderer(config, plain.tokenizer)
    yield plain, ours
    plain.shutdown()
    ours.shutdown()


def outcome(renderer: Any, text: str, **settings: Any) -> Any:
    """The prompt that a text becomes, or why it is refused."""
    from vllm.exceptions import VLLMValidationError
    from vllm.renderers import TokenizeParams

    params = TokenizeParams(**{"max_total_tokens": POSITIONS, "max_output_tokens": 1, **settings})
    try:
        [prompt] = asyncio.run(renderer.tokenize_prompts_async([{"prompt": text}], params))
    except VLLMValidationError as error:
        return str(error)
    return prompt


@pytest.mark.parametrize("kind", TROUBLE)
def test_a_megabyte_is_refused_in_the_same_words(renderers: Renderers, kind: str) -> None:
    text = TROUBLE[kind] * (MEGABYTE // len(TROUBLE[kind].encode()))
    plain, ours = (outcome(renderer, text) for renderer in renderers)
    assert plain == ours
    assert "maximum context length" in plain


@pytest.mark.parametrize(
    "settings",
    [
        {"max_total_tokens": None},
        {"max_total_tokens": 10**6},
        {"max_total_tokens": 10**6, "add_special_tokens": False},
        {"truncate_prompt_tokens": 100},
        {"truncate_prompt_tokens": -1, "truncation_side": "right"},
        {"do_lower_case": True, "max_total_tokens": None},
    ],
    ids=str,
)
def test_a_long_text_becomes_the_same_prompt(
    renderers: Renderers, settings: dict[str, Any]
) -> None:
    text = "The Quick brown fox, 123 of them. " * (3 * LONG_CHARS // 34)
    plain, ours = (outcome(renderer, text, **settings) for renderer in renderers)
    assert plain == ours
    assert len(ours["prompt_token_ids"]) >= 100


@pytest.mark.parametrize("framed", [False, True])
def test_a_conversation_becomes_the_same_prompt_turn_by_turn(
    renderers: Renderers, framed: bool
) -> None:
    plain, ours = renderers
    special = plain.tokenizer.all_special_tokens[0]
    settings = {"max_total_tokens": 10**6, "add_special_tokens": framed}
    text = f"{special}{framed}" + "You answer questions. " * (2 * LONG_CHARS // 22)
    before = ours._segment_tokenizer.kept_bytes
    for turn in range(3):
        text += f"{special} turn {turn}: " + "what is it? " * (LONG_CHARS // 30)
        whole = outcome(plain, text, **settings)
        assert outcome(ours, text, **settings) == whole
        assert outcome(ours, text, **settings) == whole
    kept_bytes = ours._segment_tokenizer.kept_bytes - before
    assert 0 < kept_bytes < 2 * 4 * len(whole["prompt_token_ids"]), "common segments are kept once"


def test_tenants_share_no_tokens(renderers: Renderers) -> None:
    _, ours = renderers
    text = "Whose words are these? " * (2 * LONG_CHARS // 23)
    kept = []
    for tenant in ("a", "b", "a"):
        before = TENANT.set(tenant)
        outcome(ours, text, max_total_tokens=10**6)
        TENANT.reset(before)
        kept.append(ours._segment_tokenizer.kept_bytes)
    assert kept[0] < kept[1] == kept[2]
