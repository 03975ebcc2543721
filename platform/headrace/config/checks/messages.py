"""Words in the messages about wrong values."""

from __future__ import annotations

import difflib
from typing import Any


def did_you_mean(word: str, known: list[str]) -> str:
    """Return `; did you mean "gateway"?` for a near miss, else the empty string."""
    near = difflib.get_close_matches(word.lower(), known, n=1, cutoff=0.6)
    return f'; did you mean "{near[0]}"?' if near else ""


def quote(value: Any) -> str:
    """Return a value as YAML would write it, and the kind of a list or a mapping."""
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    return kind_of(value) if isinstance(value, (dict, list)) else str(value)


def kind_of(value: Any) -> str:
    """Return the kind of a list or a mapping, else the value."""
    if isinstance(value, dict):
        return "a mapping"
    return "a list" if isinstance(value, list) else quote(value)
