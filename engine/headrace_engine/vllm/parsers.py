"""Gives vLLM's engine the parsers that `parsers` chooses.

`tests/unit/test_contracts_serving.py` pins what is used here.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from vllm.config import ModelConfig, ReasoningConfig, VllmConfig
from vllm.reasoning import ReasoningParserManager
from vllm.tool_parsers import ToolParserManager

from headrace_engine.serving.parsers import (
    DETAILS,
    REASONING_PARSER,
    SCALE_OUT,
    TOOL_PARSER,
    Parsers,
    choose,
)

logger = logging.getLogger("headrace.engine")


def set_parsers(
    engine_args: Any, frontend_args: Any, config: VllmConfig, given: Mapping[str, Any]
) -> Parsers:
    """Set the parsers of an engine that has not started, have usage tell cached tokens, and keep
    the routes that render prompts.

    Args:
        engine_args, frontend_args: vLLM's; changed.
        config: made from them; changed.
        given: the settings that the operator set; they stay.

    Raises:
        ValueError: the operator's settings contradict one another.
    """
    _import_plugins(engine_args, frontend_args)
    model = config.model_config
    template, mistral = _chat_template(model, frontend_args.chat_template)
    found = choose(str(model.hf_config.model_type), template, given, mistral=mistral)
    _check_names(found)
    frontend_args.enable_auto_tool_choice = found.tools is not None
    frontend_args.tool_call_parser = found.tools
    if found.template is not None:
        frontend_args.chat_template = found.template
    if DETAILS not in given:
        frontend_args.enable_prompt_tokens_details = True
    if SCALE_OUT not in given:
        frontend_args.enable_scale_out = True
    if found.reasoning and not config.structured_outputs_config.reasoning_parser:
        _set_reasoning(engine_args, config, found.reasoning)
    logger.info(
        "parser for tool calls: %s; parser for reasoning: %s",
        found.tools or f"none ({found.why_no_tools})",
        found.reasoning or "none",
    )
    return found


def _import_plugins(engine_args: Any, frontend_args: Any) -> None:
    """Import the files that register parsers; vLLM does so in its own server only."""
    if frontend_args.tool_parser_plugin:
        ToolParserManager.import_tool_parser(frontend_args.tool_parser_plugin)
    if engine_args.reasoning_parser_plugin:
        ReasoningParserManager.import_reasoning_parser(engine_args.reasoning_parser_plugin)


def _check_names(found: Parsers) -> None:
    """Refuse names that vLLM does not know before the weights are loaded.

    Raises:
        ValueError: there is no such parser.
    """
    for field, name, known in (
        (TOOL_PARSER, found.tools, ToolParserManager.list_registered()),
        (REASONING_PARSER, found.reasoning, ReasoningParserManager.list_registered()),
    ):
        if name and name not in known:
            raise ValueError(f"{field}: vLLM has no parser {name!r}; it has {', '.join(known)}")


def _set_reasoning(engine_args: Any, config: VllmConfig, parser: str) -> None:
    """Do what vLLM does for `--reasoning-parser`."""
    engine_args.reasoning_parser = parser
    for holder in (engine_args, config):
        holder.structured_outputs_config.reasoning_parser = parser
    if config.reasoning_config is None:
        reasoning = ReasoningConfig(reasoning_parser=parser)
        reasoning.initialize_token_ids(config.model_config)
        if reasoning.enabled:
            engine_args.reasoning_config = config.reasoning_config = reasoning


def _chat_template(model: ModelConfig, given: str | None) -> tuple[str | None, bool]:
    """Return the chat template that tools are rendered with, if there is one; and whether the
    tokenizer is Mistral's own, which has none."""
    from vllm.renderers.chat_utils import load_chat_template
    from vllm.renderers.hf import resolve_chat_template
    from vllm.tokenizers import cached_tokenizer_from_config
    from vllm.utils.mistral import is_mistral_tokenizer

    try:
        tokenizer = cached_tokenizer_from_config(model)
        if is_mistral_tokenizer(tokenizer):
            return None, True
        loaded = load_chat_template(given)
        return resolve_chat_template(tokenizer, loaded, [{}], model_config=model), False
    except Exception as error:
        # The code that needs the tokenizer will report what is wrong with it.
        logger.info("no chat template is known: %r", error)
        return None, False
