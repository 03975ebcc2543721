"""vLLM's backends that compile and follow the grammars of structured output.

`tests/unit/test_contracts_decode.py` pins what is used here.
"""

from __future__ import annotations

import importlib
from typing import Any

from vllm.v1.structured_output.backend_types import (
    StructuredOutputBackend,
    StructuredOutputGrammar,
    StructuredOutputOptions,
)

__all__ = ["StructuredOutputBackend", "StructuredOutputGrammar", "StructuredOutputOptions"]

BACKENDS = {
    "xgrammar": ("vllm.v1.structured_output.backend_xgrammar", "XgrammarBackend"),
    "guidance": ("vllm.v1.structured_output.backend_guidance", "GuidanceBackend"),
    "outlines": ("vllm.v1.structured_output.backend_outlines", "OutlinesBackend"),
    "lm-format-enforcer": (
        "vllm.v1.structured_output.backend_lm_format_enforcer",
        "LMFormatEnforcerBackend",
    ),
}
"""Module and class of each of vLLM's backends, by vLLM's name."""


def backend_class(name: str) -> Any:
    """Return one of `BACKENDS`; its module is imported now."""
    module, kind = BACKENDS[name]
    return getattr(importlib.import_module(module), kind)


def grammar_tokenizer(model_config: Any) -> Any:
    """Return the tokenizer with which vLLM compiles grammars."""
    from vllm.tokenizers import cached_tokenizer_from_config

    return cached_tokenizer_from_config(model_config=model_config)


def needs_guidance(tokenizer: Any, grammar: str) -> bool:
    """Return whether xgrammar is not safe for a grammar, in any of its syntaxes.

    xgrammar knows no special tokens of Mistral's own tokenizers, so that an expression in a grammar
    of Lark may match one. vLLM leaves such grammars to guidance.
    """
    from vllm.utils.mistral import is_mistral_tokenizer
    from vllm.v1.structured_output.utils import grammar_is_likely_lark

    return (
        is_mistral_tokenizer(tokenizer) and tokenizer.is_tekken and grammar_is_likely_lark(grammar)
    )


def grammar_key(wanted: Any) -> tuple[StructuredOutputOptions, str]:
    """Return the kind and the text of a grammar (vLLM's `StructuredOutputsParams`)."""
    from vllm.v1.structured_output.request import get_structured_output_key

    return get_structured_output_key(wanted)


def chosen_backend(wanted: Any) -> tuple[str | None, bool]:
    """Return the backend that vLLM's check chose for a grammar, and whether the choice was
    automatic."""
    return wanted._backend, wanted._backend_was_auto


def set_chosen_backend(wanted: Any, backend: str | None, automatic: bool) -> None:
    """Set the results of `chosen_backend`, as if vLLM had checked the grammar here."""
    wanted._backend, wanted._backend_was_auto = backend, automatic
