"""Finds the keywords of a JSON schema that xgrammar does not enforce.

xgrammar may drop a part of a schema that it compiles, and reports it only on its standard error.
Each rule here was found by compiling a schema with the keyword and having the grammar accept an
instance that violates it (xgrammar of vLLM 0.32; `tests/unit/test_grammar_keywords.py` repeats
that). vLLM's second backend, guidance, enforces most of them and refuses the others by name.

Pure, in time linear in the schema.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

IGNORED = frozenset(
    {
        *("not", "if", "then", "else", "dependentRequired", "dependentSchemas", "dependencies"),
        *("contains", "minContains", "maxContains", "propertyNames", "patternProperties"),
        *("multipleOf", "$dynamicRef", "$recursiveRef"),
    }
)
"""Keywords that are ignored everywhere, or enforced only in the simplest cases."""

FORMATS = frozenset(
    {
        *("email", "date", "time", "date-time", "duration", "ipv4", "ipv6", "hostname", "uuid"),
        *("uri", "uri-reference", "uri-template", "json-pointer", "relative-json-pointer"),
    }
)
"""Values of `format` that xgrammar knows."""

_STRING = frozenset({"minLength", "maxLength", "pattern", "format"})
_NUMBER = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"})
_ARRAY = frozenset({"minItems", "maxItems"})
_OBJECT = frozenset({"minProperties", "maxProperties"})
_SHAPE = frozenset({"properties", "required", "additionalProperties", "items", "prefixItems"})
_COMBINED = frozenset({"allOf", "anyOf", "oneOf", "$ref", "enum", "const"})
_ASSERTIONS = _STRING | _NUMBER | _ARRAY | _OBJECT | _SHAPE | _COMBINED | {"type"} | IGNORED
"""Keywords that restrict an instance; others describe it."""

_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_SINGLE = (
    *("items", "additionalItems", "additionalProperties", "contains", "propertyNames", "not"),
    *("if", "then", "else", "unevaluatedItems", "unevaluatedProperties"),
)

MAX_NAMED = 5
"""Maximum number of keywords that a message names."""

Found = tuple[str, str]
"""A keyword, and the JSON pointer of the schema that has it."""


def unenforced(schema: Any) -> list[Found]:
    """Return the keywords of a schema that xgrammar does not enforce, each with its place."""
    found: list[Found] = []
    left: list[tuple[str, Any]] = [("#", schema)]
    while left:
        place, part = left.pop()
        if isinstance(part, Mapping):
            found += [(keyword, place) for keyword in _of(part)]
            left += _below(place, part)
    return found


def named(found: list[Found]) -> str:
    """Return the keywords with their places, in words."""
    text = ", ".join(f'"{keyword}" at {place[:200]}' for keyword, place in found[:MAX_NAMED])
    return text + (f" and {len(found) - MAX_NAMED} more" if len(found) > MAX_NAMED else "")


def _of(schema: Mapping[str, Any]) -> Iterator[str]:
    """Yield the unenforced keywords of one schema, without those of nested schemas."""
    asserted = _ASSERTIONS & schema.keys()
    yield from sorted(IGNORED & schema.keys())
    if schema.get("uniqueItems"):
        yield "uniqueItems"
    yield from _combined(schema, asserted)
    kinds = schema.get("type")
    if kinds is None:
        yield from sorted(asserted & (_STRING | _NUMBER))
        if not asserted & {"items", "prefixItems"}:
            yield from sorted(asserted & _ARRAY)
        if not asserted & {"properties", "additionalProperties"}:
            yield from sorted(asserted & _OBJECT)
    lengths = asserted & {"minLength", "maxLength"}
    if asserted & {"pattern", "format"} and lengths:
        yield from sorted(lengths)
    if {"pattern", "format"} <= asserted:
        yield "pattern"
    if "format" in schema and schema["format"] not in FORMATS:
        yield "format"
    required, known = schema.get("required"), schema.get("properties")
    if isinstance(required, list) and not set(map(str, required)) <= set(known or ()):
        yield "required"


def _combined(schema: Mapping[str, Any], asserted: frozenset[str]) -> Iterator[str]:
    """Yield keywords that xgrammar takes for the whole schema, dropping the other keywords."""
    alone = len(asserted) == 1
    branches = schema.get("allOf")
    if branches is not None and not (alone and isinstance(branches, list) and len(branches) == 1):
        yield "allOf"
    if "anyOf" in schema and not alone:
        yield "anyOf"
    if "oneOf" in schema:
        yield "oneOf"
    if "$ref" in schema and not alone:
        yield "$ref"
    for keyword in ("enum", "const"):
        if keyword not in schema:
            continue
        values = schema[keyword] if keyword == "enum" else [schema[keyword]]
        if asserted - {keyword, "type"} or not _are_of(values, schema.get("type")):
            yield keyword


def _are_of(values: Any, kinds: Any) -> bool:
    """Return whether all values have one of the types."""
    if kinds is None or not isinstance(values, list):
        return True
    allowed = set(kinds) if isinstance(kinds, list) else {kinds}
    return all(_types(value) & allowed for value in values)


def _types(value: Any) -> set[str]:
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, int):
        return {"integer", "number"}
    if isinstance(value, float):
        return {"number"} | ({"integer"} if value.is_integer() else set())
    names = {str: "string", list: "array", dict: "object", type(None): "null"}
    return {names.get(type(value), "")}


def _below(place: str, schema: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the schemas directly inside one, with their places."""
    for keyword in _MAPS:
        if isinstance(inner := schema.get(keyword), Mapping):
            for name, one in inner.items():
                yield f"{place}/{keyword}/{_escaped(name)}", one
    for keyword in _LISTS:
        if isinstance(inner := schema.get(keyword), list):
            for number, one in enumerate(inner):
                yield f"{place}/{keyword}/{number}", one
    for keyword in _SINGLE:
        if isinstance(inner := schema.get(keyword), Mapping):
            yield f"{place}/{keyword}", inner


def _escaped(name: Any) -> str:
    return str(name).replace("~", "~0").replace("/", "~1")
