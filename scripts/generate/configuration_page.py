"""Generates docs/configuration.md from the schema, so that the two cannot differ."""

from __future__ import annotations

import json
import types
import typing
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from headrace.config.load import preset_names, preset_text
from headrace.config.schema import HeadraceConfig

HEADER = """\
<!-- Written by `make docs`; change the schema in platform/headrace/config/. -->
# Configuration

`headrace up -f config.yaml` reads one YAML file. Values come from four sources, and a later source
wins field by field:

1. the defaults, which the tables below list;
2. a preset: `--preset NAME` on the command line, else `preset: NAME` at the top of the file;
3. the file;
4. each `--set section.field=value` on the command line, in turn.

The Helm chart takes the same fields as values under `config`, and has presets of its own
([Install](install.md)).

`headrace config init` writes a commented file with the ten fields that people set first.
`headrace config check -f config.yaml` reports every mistake in a file, with its line. Only values
that must fit a value that is wrong itself are compared later, when that one is right. `headrace
config show -f config.yaml` prints the resulting configuration, `headrace config diff -f
config.yaml` what differs from the defaults. `headrace up` checks the configuration first: an
unknown field or an impossible value stops it before anything starts.
"""


def render() -> str:
    """Return the whole page, in Markdown."""
    parts = [HEADER]
    top = {n: f for n, f in HeadraceConfig.model_fields.items() if not section_of(f)}
    parts.append(table("Top level", "", top))
    first = ["model", "prefill", "gateway", "router"]
    rest = [n for n in HeadraceConfig.model_fields if n not in (*first, *top, "decode")]
    for name in first + rest:
        section = section_of(HeadraceConfig.model_fields[name])
        assert section is not None
        title = "`prefill` and `decode`" if name == "prefill" else f"`{name}`"
        parts.append(table(title, section.__doc__ or "", section.model_fields))
        for path, inner in inner_sections(name, section):
            parts.append(table(f"`{path}`", inner.__doc__ or "", inner.model_fields))
    parts.append("## Presets\n")
    for preset in ["laptop", *(n for n in preset_names() if n != "laptop")]:
        parts.append(f"### {preset}\n\n```yaml\n{preset_text(preset).rstrip()}\n```\n")
    return "\n".join(parts)


def inner_sections(path: str, section: type[BaseModel]) -> Iterator[tuple[str, type[BaseModel]]]:
    """Yield the sections in a section, and those of a mapping of sections, each with its path."""
    for name, field in section.model_fields.items():
        for kind in typing.get_args(field.annotation) or (field.annotation,):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                mapped = typing.get_origin(field.annotation) is dict
                inner = f"{path}.{name}{'.NAME' if mapped else ''}"
                yield inner, kind
                yield from inner_sections(inner, kind)


def section_of(field: FieldInfo) -> type[BaseModel] | None:
    """Return the model of a field that is a section; None if the field is a value."""
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def table(title: str, about: str, fields: dict[str, FieldInfo]) -> str:
    """Return a section in Markdown: a heading, the text `about` it, and a row for each field."""
    lines = [f"## {title}", ""]
    if about:
        lines += [" ".join(about.split()), ""]
    lines += ["| Field | Type | Default | Meaning |", "| --- | --- | --- | --- |"]
    for name, field in fields.items():
        kind = _type(field.annotation) + _bounds(field)
        lines.append(f"| `{name}` | {kind} | {_default(field)} | {field.description} |")
    return "\n".join(lines) + "\n"


def _type(kind: Any) -> str:
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Literal:
        return ", ".join(f"`{a}`" for a in args)
    if origin in (typing.Union, types.UnionType):
        names = [_type(a) for a in args if a is not type(None)]
        return " or ".join(names) + (" or null" if type(None) in args else "")
    if origin is typing.Annotated:
        return _type(args[0])
    if origin is list:
        return f"list of {_type(args[0])}"
    if origin is dict:
        return "mapping"
    return {int: "whole number", float: "number", str: "text", bool: "true or false"}.get(
        kind, "value"
    )


def _bounds(field: FieldInfo) -> str:
    signs = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
    found = [
        f"{sign} {getattr(meta, attribute):,}"
        for meta in field.metadata
        for attribute, sign in signs.items()
        if getattr(meta, attribute, None) is not None
    ]
    return f" ({', '.join(found)})" if found else ""


def _default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True)
    if value is PydanticUndefined:
        return "none: must be set"
    return "below" if isinstance(value, BaseModel) else f"`{json.dumps(value)}`"
