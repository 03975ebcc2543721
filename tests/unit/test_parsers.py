"""Parsers for tool calls and reasoning follow from a family; what an operator sets stays."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import _compile_jinja_template
from vllm.reasoning import ReasoningParserManager
from vllm.tool_parsers import ToolParserManager

from headrace_engine.serving.parsers import FAMILIES, SMOLLM2, TEMPLATES, choose, shared

HERMES = "{% for tool in tools %} in <tool_call></tool_call> tags {% endfor %}"
THINKING = HERMES + "{% if enable_thinking is false %}<think>\n\n</think>{% endif %}"
XML = "{% for tool in tools %}<tool_call><function=f>{% endfor %}"
OWN = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\n" + SMOLLM2 + "<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""SmolLM2's own template."""
LLAMA3 = '{{ tools }} {"name": f, "parameters": dictionary of argument name and its value}'
DEEPSEEK = "{{ tools }}{{ tool['type'] + '<\uff5ctool\u2581sep\uff5c>' }}<think>"
DISTILLED = "{{ '<\uff5cAssistant\uff5c><think>\\n' }}<\uff5ctool\u2581sep\uff5c>"


@pytest.mark.parametrize(
    ("model_type", "template", "tools", "reasoning"),
    [
        ("qwen2", HERMES, "hermes", None),
        ("qwen2_5_vl", HERMES, "hermes", None),
        ("qwen2", THINKING, "hermes", "deepseek_r1"),
        ("qwen3", THINKING, "hermes", "qwen3"),
        ("qwen3_moe", HERMES, "hermes", None),
        ("qwen3_moe", XML, "qwen3_coder", None),
        ("qwen3_5", XML + "<think>", "qwen3_coder", "qwen3"),
        ("nemotron_h", XML + "enable_thinking", "qwen3_coder", "nemotron_v3"),
        ("llama", HERMES, "hermes", None),
        ("llama", LLAMA3, "llama3_json", None),
        ("llama4", LLAMA3, "llama4_json", None),
        ("mistral", "{{ tools }}[TOOL_CALLS]", "mistral", None),
        ("deepseek_v3", DEEPSEEK, "deepseek_v3", "deepseek_r1"),
        ("deepseek_v3", "{{ tools }}<\uff5ctool\u2581sep\uff5c>", "deepseek_v31", None),
        ("deepseek_v4", None, "deepseek_v4", "deepseek_v4"),
        ("gpt_oss", "{{ tools }}", "openai", "openai_gptoss"),
        ("kimi_k2", "{{ tools }}<|tool_calls_section_begin|>", "kimi_k2", None),
        ("glm4_moe", "{{ tools }}<arg_key><think>", "glm47", "glm45"),
        ("granite", "{{ tools }}<|tool_call|>", "granite", None),
        ("granitemoehybrid", HERMES, "granite4", None),
        ("minimax_m2", "{{ tools }}<minimax:tool_call>", "minimax_m2", "minimax_m2"),
        ("qwen2", DISTILLED, None, "deepseek_r1"),
        ("olmo2", XML, None, None),
        ("llama", "{{ messages }}", None, None),
        ("llama", None, None, None),
    ],
)
def test_parsers_follow_from_the_family(
    model_type: str, template: str | None, tools: str | None, reasoning: str | None
) -> None:
    found = choose(model_type, template, {})
    assert (found.tools, found.reasoning) == (tools, reasoning)
    assert (found.why_no_tools is None) == (tools is not None)


def test_mistrals_own_tokenizer_has_mistrals_format() -> None:
    assert choose("mistral3", None, {}, mistral=True).tools == "mistral"


def test_every_parser_of_the_table_is_one_of_vllms() -> None:
    tools, reasoning = ToolParserManager.list_registered(), ReasoningParserManager.list_registered()
    for family in FAMILIES:
        assert family.tools is None or family.tools in tools
        assert family.reasoning is None or family.reasoning in reasoning


@pytest.mark.parametrize(
    ("given", "tools", "reasoning"),
    [
        ({"tool_call_parser": "pythonic"}, "pythonic", "qwen3"),
        ({"tool_call_parser": "pythonic", "enable_auto_tool_choice": True}, "pythonic", "qwen3"),
        ({"enable_auto_tool_choice": True}, "hermes", "qwen3"),
        ({"enable_auto_tool_choice": False}, None, "qwen3"),
        ({"reasoning_parser": ""}, "hermes", None),
        ({"reasoning_parser": "granite"}, "hermes", "granite"),
    ],
)
def test_what_the_operator_sets_stays(
    given: dict[str, Any], tools: str | None, reasoning: str | None
) -> None:
    found = choose("qwen3", THINKING, given)
    assert (found.tools, found.reasoning) == (tools, reasoning)


@pytest.mark.parametrize(
    "given",
    [
        {"enable_auto_tool_choice": True},
        {"enable_auto_tool_choice": False, "tool_call_parser": "hermes"},
    ],
)
def test_settings_without_effect_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="enable_auto_tool_choice"):
        choose("llama", "{{ messages }}", given)


def test_smollm2_gets_a_template_that_shows_tools() -> None:
    found = choose("llama", OWN, {})
    assert found.tools == "hermes" and found.template is not None
    with_tools = _compile_jinja_template(Path(found.template).read_text())
    tool = {"type": "function", "function": {"name": "weather", "parameters": {}}}
    call = {"id": "1", "function": {"name": "weather", "arguments": {"city": "Rome"}}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "How warm is it?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "21"},
    ]
    text = with_tools.render(messages=messages, tools=[tool], add_generation_prompt=True)
    assert '"name": "weather", "parameters": {}' in text
    assert re.search(r'<tool_call>\n\{"name": "weather", .*"Rome"\}\}\n</tool_call>', text)
    assert text.endswith("<|im_start|>tool\n21<|im_end|>\n<|im_start|>assistant\n")
    assert choose("llama", OWN, {"chat_template": "mine.jinja"}).template is None


@pytest.mark.parametrize("prompt", [True, False])
@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": "hi"}],
        [{"role": "system", "content": " s\n"}, {"role": "user", "content": "a\n\nb "}],
        [{"role": "user", "content": ""}, {"role": "assistant", "content": "x<|y|>"}],
    ],
)
def test_without_tools_that_template_renders_as_smollm2s_own(
    messages: list[dict[str, str]], prompt: bool
) -> None:
    own = _compile_jinja_template(OWN)
    ours = _compile_jinja_template((TEMPLATES / "smollm2.jinja").read_text())
    told = {"messages": messages, "add_generation_prompt": prompt}
    assert ours.render(**told) == own.render(**told)


def test_prefill_replicas_answer_as_decode_replicas_do() -> None:
    decode = {"tool_call_parser": "pythonic", "chat_template": "a.jinja", "max_num_seqs": 8}
    assert shared(decode, {"max_num_seqs": 4, "chat_template": "b.jinja"}) == {
        "tool_call_parser": "pythonic",
        "chat_template": "b.jinja",
        "max_num_seqs": 4,
    }
