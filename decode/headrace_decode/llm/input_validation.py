"""Refuses requests that pass vLLM's own checks but crash its engine.

A number that indexes memory, does not fit a machine word or asks for a vast grammar fails only
inside the engine's process, and ends it together with all its requests. Each rule here names a
field that did so. Pure: the caller turns the answer into its error.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from typing import Any

from headrace_decode.grammars.limits import MAX_COUNT, too_large

LARGEST = 2**31 - 1
"""Maximum of a count: no client needs more, and some of vLLM's buffers hold 32 bits."""
LARGEST_FLOAT = 3.4e38

# The text is a client's, so no part may be read twice: every repetition is possessive (`*+`), and
# no text after a brace contains another brace, so that no two matches try the same characters.
_VAST_REPETITION = re.compile(r"\{\s*+(?:\d{7,}+|\d*+\s*+,?+\s*+\d{7,}+)")
_ESCAPED = re.compile(r"\\.", re.DOTALL)
_LITERAL = re.compile(r'"[^"\n]*+"')
"""A quoted text of a grammar, once escaped characters are removed."""

_COUNTS = frozenset(
    bound + what
    for bound in ("min", "max")
    for what in ("Items", "Length", "Properties", "Contains")
)
_DATA = frozenset({"enum", "const", "default", "examples", "description", "title", "$comment"})
"""Keywords of a JSON schema whose values are texts and data, not schemas."""
_NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
"""Keywords whose values are schemas by a name of the client's choice."""
_JSON, _REGEX, _GRAMMAR = ("json", "structural_tag"), ("regex", "whitespace_pattern"), ("grammar",)


def why_invalid(
    token_ids: Sequence[int] | None, params: Any, vocabulary: int, *, all_rows: bool = True
) -> tuple[str, str] | None:
    """Return why a request cannot run, and the field that is wrong; None if it can run.

    Args:
        token_ids: the prompt, if it is plain token ids.
        params: vLLM's `SamplingParams`.
        vocabulary: number of tokens in the model's vocabulary.
        all_rows: whether a prompt's rows run in all layers (no `kv_sharing_fast_prefill`).
    """
    if token_ids and max(token_ids) >= vocabulary:
        return f"token id {max(token_ids)} is not in the vocabulary of {vocabulary}", "prompt"
    if not all_rows and params.prompt_logprobs is not None:
        # vLLM refuses all numbers but 0, which its engine does not survive.
        return (
            "this engine has no log-probabilities of prompt tokens (kv_sharing_fast_prefill)",
            "prompt_logprobs",
        )
    if params.top_k > LARGEST:
        return f"top_k must be at most {LARGEST}", "top_k"
    for token_id in params.stop_token_ids or ():
        if not 0 <= token_id < vocabulary:
            return f"token id {token_id} is not in the vocabulary", "stop_token_ids"
    for bias in (params.logit_bias or {}).values():
        if not math.isfinite(bias) or abs(bias) > LARGEST_FLOAT:
            return "a bias is not a finite 32-bit number", "logit_bias"
    if params.structured_outputs is not None:
        why = _grammar_refused(params.structured_outputs)
        return None if why is None else (why, "structured_outputs")
    return None


def _grammar_refused(wanted: Any) -> str | None:
    """Return why a grammar is refused without a trial (`grammars`); None if it may be tried."""
    parts = {
        name: getattr(wanted, name)
        for name in ("json", "regex", "choice", "grammar", "structural_tag", "whitespace_pattern")
    }
    if why := too_large(parts):
        return why
    vast = (
        any(_is_vast_schema(parts[name]) for name in _JSON)
        or any(_is_vast_regex(parts[name]) for name in _REGEX)
        or any(_is_vast_grammar(parts[name]) for name in _GRAMMAR)
    )
    return f"a count in a grammar is over {MAX_COUNT}" if vast else None


def _is_vast_regex(pattern: Any) -> bool:
    """Return whether a regular expression repeats something more than `MAX_COUNT` times.

    A trial refuses the repetitions that this check does not find (`grammars`).
    """
    return isinstance(pattern, str) and bool(_VAST_REPETITION.search(_ESCAPED.sub("", pattern)))


def _is_vast_grammar(text: Any) -> bool:
    """Return whether a grammar repeats something so often, outside of its quoted texts."""
    return isinstance(text, str) and _is_vast_regex(_LITERAL.sub('""', _ESCAPED.sub("", text)))


def _is_vast_schema(spec: Any) -> bool:
    """Return whether a JSON schema, or a structural tag with schemas in it, has such a count.

    Data in a schema may hold any number and any text. Text that is not JSON is left to the trial.
    """
    if isinstance(spec, str):
        try:
            spec = json.loads(spec)
        except (ValueError, RecursionError):
            return False
    left: list[tuple[Any, bool]] = [(spec, False)]
    while left:
        value, is_named = left.pop()
        if isinstance(value, list | tuple):
            left.extend((each, False) for each in value)
        elif isinstance(value, dict):
            for name, part in value.items():
                if is_named:
                    left.append((part, False))
                elif _is_vast_keyword(name, part):
                    return True
                elif name not in _DATA:
                    left.append((part, name in _NAMED))
    return False


def _is_vast_keyword(name: str, value: Any) -> bool:
    if name in _COUNTS:
        return isinstance(value, int | float) and value > MAX_COUNT
    if name == "pattern":
        return _is_vast_regex(value)
    if name == "grammar":
        return _is_vast_grammar(value)
    return (
        name == "patternProperties" and isinstance(value, dict) and any(map(_is_vast_regex, value))
    )
