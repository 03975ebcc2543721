"""Parsers for tool calls and reasoning, chosen from a model's family.

vLLM has a parser for each format in which models write tool calls and thoughts, and leaves the
choice to the operator. A model's chat template shows its format to the model, so the choice follows
from the template: a family is a `model_type` and a piece of text in the template. A model whose
template shows no tools to it gets no parser for tool calls, since it could not know them.

The table holds what vLLM's documentation (`docs/features/tool_calling.md`,
`docs/features/reasoning_outputs.md`) and vLLM's recipes (https://recipes.vllm.ai, read in the state
of August 21st, 2026) name for each family. An operator's own settings are never changed.

Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

ENABLE, TOOL_PARSER, REASONING_PARSER = (
    "enable_auto_tool_choice",
    "tool_call_parser",
    "reasoning_parser",
)
TEMPLATE, DETAILS = "chat_template", "enable_prompt_tokens_details"
SCALE_OUT = "enable_scale_out"
SHARED_SETTINGS = (
    *(ENABLE, TOOL_PARSER, "tool_parser_plugin", REASONING_PARSER, "reasoning_parser_plugin"),
    *(TEMPLATE, "chat_template_content_format", "default_chat_template_kwargs"),
    *("trust_request_chat_template", "exclude_tools_when_tool_choice_none", DETAILS),
    *(SCALE_OUT, "tool_strict_level"),
)
"""Engine settings that shape answers. Prefill replicas answer clients, too, while no decode replica
can, so both roles need the same."""

SMOLLM2 = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
"""The default system prompt in the template of SmolLM2's instruct models. Their template shows no
tools, so they get one that does and is otherwise the same."""
DEEPSEEK_CALL = "<\uff5ctool\u2581sep\uff5c>"
DEEPSEEK_THOUGHT = "<\uff5cAssistant\uff5c><think>"
TEMPLATES = Path(__file__).with_name("templates")
_THINKS = ("<think>", "enable_thinking", "<seed:think>")


@dataclass(frozen=True, slots=True)
class Family:
    """Models that write tool calls in one format.

    Attributes:
        models: patterns of `model_type`.
        format: text that the chat template holds if it shows this format; "" for families whose
            prompts vLLM renders without a template.
        tools: vLLM's parser for tool calls; None if vLLM names none.
        reasoning: vLLM's parser for reasoning; None if the family does not reason.
        always: whether the family reasons also where its template does not say so.
        source: the page that names the parsers.
        template: a file beside this one: a chat template for models whose own shows no tools.
    """

    models: tuple[str, ...]
    format: str
    tools: str | None
    reasoning: str | None = None
    always: bool = False
    source: str = "tool_calling"
    template: str | None = None


FAMILIES: tuple[Family, ...] = (
    # Without a template: vLLM renders these itself.
    Family(("gpt_oss",), "", "openai", "openai_gptoss", True, "recipes/openai"),
    Family(("deepseek_v32",), "", "deepseek_v32", "deepseek_v3", True, "recipes/deepseek-ai"),
    Family(("deepseek_v4",), "", "deepseek_v4", "deepseek_v4", True, "recipes/deepseek-ai"),
    Family(("kimi_k3",), "", "kimi_k3", "kimi_k3", True, "recipes/moonshotai"),
    # Formats with a marker of their own.
    Family(("kimi*", "deepseek_v3"), "<|tool_calls_section_begin|>", "kimi_k2", "kimi_k2"),
    Family(
        *(("deepseek_v3",), f"tool['type'] + '{DEEPSEEK_CALL}'", "deepseek_v3", "deepseek_r1"),
        source="recipes/deepseek-ai",
    ),
    Family(
        *(("deepseek_v3",), DEEPSEEK_CALL, "deepseek_v31", "deepseek_v3"),
        source="recipes/deepseek-ai",
    ),
    Family(
        *(("minimax_m3*",), "]<]minimax[>[<tool_call>", "minimax_m3", "minimax_m3", True),
        source="recipes/MiniMaxAI",
    ),
    Family(
        *(("minimax*",), "<minimax:tool_call>", "minimax_m2", "minimax_m2", True),
        source="recipes/MiniMaxAI",
    ),
    Family(
        *(("seed_oss",), "<seed:tool_call>", "seed_oss", "seed_oss"),
        source="recipes/ByteDance-Seed",
    ),
    Family(
        *(("gemma4*", "diffusion_gemma*"), "<|tool_call>", "gemma4", "gemma4", True),
        source="recipes/Google",
    ),
    Family(("lfm2*",), "<|tool_call_start|>", "lfm2", "qwen3", source="recipes/LiquidAI"),
    Family(("longcat*",), "<longcat_tool_call>", "longcat"),
    Family(("olmo3", "olmo_hybrid"), "<function_calls>", "olmo3", "olmo3"),
    Family(("jamba",), "<tool_calls>", "jamba"),
    Family(("hunyuan_v1_moe",), "<tool_calls>", "hunyuan_a13b", "hunyuan_a13b"),
    Family(("granite", "granitemoe"), "<|tool_call|>", "granite"),
    Family(("granitemoehybrid",), "<tool_call>", "granite4"),
    Family(("muse_glimmer*",), "", "muse_glimmer", "muse_glimmer", True, "recipes/meta-models"),
    Family(("inkling*",), "", "inkling", "inkling", True, "recipes/thinkingmachines"),
    Family(("laguna",), "<arg_key>", "poolside_v1", "poolside_v1", source="recipes/poolside"),
    Family(("hy_v3",), "<arg_key", "hy_v3", "hy_v3", True, "recipes/tencent"),
    Family(("hy_v4",), "<arg_key", "hy_v4", "hy_v4", True, "vllm/tool_parsers"),
    Family(("bailing*",), "<arg_key>", "ling3", "ling3", source="recipes/inclusionAI"),
    Family(("glm4_moe*", "glm_moe_dsa", "glm5*"), "<arg_key>", "glm47", "glm45"),
    Family(("glm4v_moe*", "glm46v*"), "<arg_key>", "glm45", "glm45", source="recipes/zai-org"),
    # XML in tool calls. A format whose parameters have tags is not Hermes' JSON.
    Family(
        *(("step3p*",), "<function=", "step3p5", "step3p5", True),
        source="recipes/stepfun-ai",
    ),
    Family(("nemotron_h*",), "<function=", "qwen3_coder", "nemotron_v3", source="recipes/nvidia"),
    Family(("mimo*",), "<function=", "mimo", "mimo", source="recipes/XiaomiMiMo"),
    Family(("afmoe",), "<function=", "qwen3_coder", "deepseek_r1", source="recipes/arcee-ai"),
    Family(
        *(("qwen*", "interns2*", "minicpmv*"), "<function=", "qwen3_coder", "qwen3"),
        source="recipes/Qwen",
    ),
    Family(("*",), "<function=", None),
    # JSON in tool calls.
    Family(("*",), SMOLLM2, "hermes", template="smollm2.jinja", source="headrace"),
    Family(("qwen3*", "mellum"), "<tool_call>", "hermes", "qwen3", source="recipes/Qwen"),
    Family(("qwen2",), "<tool_call>", "hermes", "deepseek_r1"),  # QwQ-32B reasons
    Family(("llama", "mistral", "mixtral", "qwen2*"), "<tool_call>", "hermes"),
    Family(("mistral*", "ministral*", "mixtral", "pixtral"), "[TOOL_CALLS]", "mistral"),
    Family(("llama4*",), '"parameters": dictionary of argument name', "llama4_json"),
    Family(("llama", "mllama"), '"parameters": dictionary of argument name', "llama3_json"),
    # Reasoning alone: distilled from DeepSeek-R1.
    Family(
        *(("qwen2", "llama"), DEEPSEEK_THOUGHT, None, "deepseek_r1"),
        source="reasoning_outputs",
    ),
)
"""Known families. The first that matches counts."""


@dataclass(frozen=True, slots=True)
class Parsers:
    """The parsers that an engine gets.

    Attributes:
        tools: for tool calls; None for none.
        reasoning: for reasoning; None for none.
        why_no_tools: why there is no parser for tool calls, in words; None if there is one.
        template: the file of the chat template to use; None for the model's own template.
    """

    tools: str | None
    reasoning: str | None
    why_no_tools: str | None = None
    template: str | None = None


def choose(
    model_type: str, template: str | None, given: Mapping[str, Any], *, mistral: bool = False
) -> Parsers:
    """Return the parsers of an engine.

    Args:
        model_type: of the model's config.json.
        template: the chat template that tools are rendered with; None if the model has none.
        given: the engine settings that the operator set, by vLLM's names.
        mistral: whether the tokenizer is Mistral's own (`tokenizer_mode: mistral`).

    Raises:
        ValueError: the operator's settings contradict one another.
    """
    if given.get(ENABLE) is False and given.get(TOOL_PARSER):
        raise ValueError(
            f"{TOOL_PARSER}: {given[TOOL_PARSER]} has no effect with {ENABLE}: false; remove one"
        )
    family = _family(model_type, template, mistral=mistral)
    reasoning = given.get(REASONING_PARSER, _reasoning(family, template)) or None
    if given.get(TOOL_PARSER):
        return Parsers(given[TOOL_PARSER], reasoning)
    if given.get(ENABLE) is False:
        return Parsers(None, reasoning, f"{ENABLE} is false")
    own = family.template if family is not None and not given.get(TEMPLATE) else None
    file = None if own is None else TEMPLATES / own
    why = _why_no_tools(family, model_type, template if file is None else file.read_text("utf-8"))
    if why is None:
        assert family is not None
        return Parsers(family.tools, reasoning, template=None if file is None else str(file))
    if given.get(ENABLE):
        raise ValueError(f"{ENABLE} needs {TOOL_PARSER}: {why}")
    return Parsers(None, reasoning, why)


def shared(decode: Mapping[str, Any], prefill: Mapping[str, Any]) -> dict[str, Any]:
    """Return the prefill engine's settings, with those that shape answers added from decode."""
    return {name: decode[name] for name in SHARED_SETTINGS if name in decode} | dict(prefill)


_MISTRAL = Family(("*",), "", "mistral", "mistral")


def _family(model_type: str, template: str | None, *, mistral: bool) -> Family | None:
    if mistral:
        return _MISTRAL
    for family in FAMILIES:
        known = any(fnmatchcase(model_type, pattern) for pattern in family.models)
        if known and (not family.format or family.format in (template or "")):
            return family
    return None


def _reasoning(family: Family | None, template: str | None) -> str | None:
    if family is None:
        return None
    thinks = family.always or any(sign in (template or "") for sign in _THINKS)
    return family.reasoning if thinks else None


def _why_no_tools(family: Family | None, model_type: str, template: str | None) -> str | None:
    if family is not None and family.tools is not None and not family.format:
        return None
    if template is None:
        return "the model has no chat template"
    if "tools" not in template:
        return "the model's chat template does not show tools to the model"
    if family is None or family.tools is None:
        return f"no parser is known for models of type {model_type} with this chat template"
    return None
