"""Merges preset, YAML file and `--set` overrides into one checked configuration.

Later sources win field by field: the defaults, the preset, the file, then each override in turn.
The preset is the one that `--preset` names, else the one that the file names as `preset:`.
"""

from __future__ import annotations

import typing
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from headrace.config.checks.configuration import check
from headrace.config.checks.file_lines import with_file_lines
from headrace.config.checks.messages import did_you_mean, kind_of, quote
from headrace.config.models import merge
from headrace.config.renamed import renamed
from headrace.config.schema import HeadraceConfig


class ConfigError(ValueError):
    """The configuration cannot be used. `problems` has one line for each mistake."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(problems))


def preset_names() -> list[str]:
    """Return the names of the presets that come with Headrace."""
    folder = files("headrace") / "presets"
    return sorted(
        f.name.removesuffix(".yaml") for f in folder.iterdir() if f.name.endswith(".yaml")
    )


def preset_text(name: str) -> str:
    """Return a preset's YAML. Raises ConfigError if there is none of that name."""
    names = preset_names()
    if name not in names:
        hint = did_you_mean(name, names) or f"; there are {', '.join(names)}"
        raise ConfigError([f'preset: there is none called "{name}"{hint}'])
    return (files("headrace") / "presets" / f"{name}.yaml").read_text("utf-8")


def load_config(
    path: Path | str | None = None,
    preset: str | None = None,
    overrides: Iterable[str] = (),
) -> HeadraceConfig:
    """Merge the sources and check the result.

    Args:
        path: a YAML file, or None.
        preset: one of `preset_names()`; it wins over the file's `preset:`. None takes the file's,
            else the defaults (which are `laptop`).
        overrides: `a.b=c` strings; the value is read as YAML.

    Raises:
        ConfigError: with every problem that was found, not only the first.
    """
    given: dict[str, Any] = {}
    text, overrides = "", list(overrides)
    if path is not None:
        file = Path(path).expanduser()
        try:
            text = file.read_text("utf-8")
        except OSError as error:
            raise ConfigError([f"{path}: cannot be read: {error.strerror or error}"]) from None
        except UnicodeDecodeError as error:
            raise ConfigError([f"{path}: is not UTF-8 text (byte {error.start})"]) from None
        given = _relative_to(file.parent, parse_yaml(text, str(path)))
        named = given.pop("preset", None)
        if named is not None and not isinstance(named, str):
            raise ConfigError([f"preset: must be text, got {quote(named)}"])
        preset = preset or named
    data: dict[str, Any] = {}
    if preset is not None:
        data = parse_yaml(preset_text(preset), f"preset {preset}")
    data = merge(data, given)
    for override in overrides:
        data = apply_override(data, override)
    try:
        return validate(_relative_to(Path.cwd(), data))
    except ConfigError as error:
        if path is None:
            raise
        fields = [each.partition("=")[0].strip() for each in overrides]
        raise ConfigError(with_file_lines(error.problems, str(path), text, fields)) from None


def validate(data: Mapping[str, Any], *, files_here: bool = True) -> HeadraceConfig:
    """Make a configuration from plain data.

    Args:
        files_here: whether the files that it names should be on this machine.

    Raises:
        ConfigError: with every problem found.
    """
    config, lines, wrong = _read(data)
    problems = check(config, files_here=files_here, wrong=wrong)
    lines += [f"{where}: {what}" for where, what in problems]
    if lines:
        raise ConfigError(lines)
    return config


def _read(data: Mapping[str, Any]) -> tuple[HeadraceConfig, list[str], set[str]]:
    """Return the configuration without its wrong values, a line for each of these, and the names of
    the sections that had some.

    Raises:
        ConfigError: it is wrong as a whole.
    """
    lines: list[str] = []
    wrong: set[str] = set()
    while True:
        try:
            return HeadraceConfig.model_validate(data), lines, wrong
        except ValidationError as error:
            found = _without_repeats(error.errors(include_url=False))
        # Later errors may be due to the values that are left out.
        lines = lines or [explain(each) for each in found]
        rest = data
        for loc in filter(None, (each["loc"] for each in found)):
            rest = _without(rest, loc)
            wrong.add(str(loc[0]))
        if rest == data:
            raise ConfigError(lines)
        data = rest


def _without_repeats(found: Sequence[ErrorDetails]) -> list[ErrorDetails]:
    """Return the errors without those that models have from a wrong value of the top level."""
    places = {each["loc"] for each in found}
    return [one for one in found if one["loc"][:1] != ("models",) or one["loc"][2:] not in places]


def _without(data: Mapping[str, Any], loc: Sequence[int | str]) -> dict[str, Any]:
    """Return the data without a field of a section, or without a section that is wrong itself."""
    name, *inner = loc
    section = data.get(str(name))
    out = {key: value for key, value in data.items() if str(key) != str(name)}
    if inner and isinstance(section, Mapping):
        out[str(name)] = _without(section, inner[:1])
    return out


class _Loader(yaml.SafeLoader):
    """Loader of safe YAML that refuses a key given twice; plain YAML would take the last value."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, str) and key in seen and key != "<<":
                raise yaml.constructor.ConstructorError(
                    None, None, f'"{key}" is given twice', key_node.start_mark
                )
            if isinstance(key, str):
                seen.add(key)
        return super().construct_mapping(node, deep)


def parse_yaml(text: str, name: str) -> dict[str, Any]:
    """Return the mapping in a YAML text. Raises ConfigError, with line and column, without one."""
    try:
        data = yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{name}:{mark.line + 1}:{mark.column + 1}" if mark else name
        raise ConfigError([f"{where}: not valid YAML: {error.problem or error.context}"]) from None
    except yaml.YAMLError as error:
        raise ConfigError([f"{name}: not valid YAML: {' '.join(str(error).split())}"]) from None
    except RecursionError:
        raise ConfigError([f"{name}: not valid YAML: nested too deeply"]) from None
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError([f"{name}: must hold `field: value` lines, got {kind_of(data)}"])
    return data


def apply_override(data: Mapping[str, Any], override: str) -> dict[str, Any]:
    """Return `data` with the override `a.b=c`. Raises ConfigError if it does not have that form."""
    path, equals, text = override.partition("=")
    keys = path.strip().split(".")
    if keys == ["preset"]:
        raise ConfigError(
            ["preset: choose one with --preset NAME, or with `preset: NAME` in a file"]
        )
    if not equals or not all(keys):
        raise ConfigError([f'--set {override}: must be like "gateway.port=8001"'])
    try:
        value: Any = yaml.load(text, Loader=_Loader) if text.strip() else ""
    except yaml.YAMLError:
        value = text
    nested: dict[str, Any] = {keys[-1]: value}
    for key in reversed(keys[:-1]):
        nested = {key: nested}
    for depth in range(1, len(keys)):
        if _holds_a_value(data, keys[:depth]):
            raise ConfigError([f"{'.'.join(keys[:depth])}: holds a value, so {path} cannot be set"])
    return merge(data, nested)


def _holds_a_value(data: Any, keys: Sequence[str]) -> bool:
    """Whether `keys` lead to a value that is neither null nor a mapping."""
    for key in keys:
        if not isinstance(data, Mapping):
            return True
        data = data.get(key)
        if data is None:
            return False
    return not isinstance(data, Mapping)


FILES = (
    *(
        ("gateway", name)
        for name in ("api_keys_file", "tls_cert_file", "tls_key_file", "tls_client_ca_file")
    ),
    ("techniques", "sparse", "calibration"),
    ("techniques", "compression", "calibration"),
)
"""Fields that name files."""


def _relative_to(folder: Path, data: dict[str, Any]) -> dict[str, Any]:
    """Make file names absolute: in a configuration file they count from the file's folder, and on
    the command line from the current one."""
    models = data.get("models")
    names = list(models) if isinstance(models, dict) else []
    for path in (*FILES, *(("models", name, *path) for name in names for path in FILES)):
        *sections, field = path
        section: Any = data
        for each in sections:
            section = section.get(each) if isinstance(section, dict) else None
        if isinstance(section, dict) and isinstance(section.get(field), str):
            change: dict[str, Any] = {
                field: str(folder.resolve() / Path(section[field]).expanduser())
            }
            for each in reversed(sections):
                change = {each: change}
            data = merge(data, change)
    return data


def explain(error: ErrorDetails) -> str:
    """Return one pydantic error as one line: the path, what is wrong and what would be right."""
    loc = error["loc"]
    path = ".".join(str(part) for part in loc) or "configuration"
    got = error.get("input")
    context: dict[str, Any] = dict(error.get("ctx") or {})
    kind = error["type"]
    if loc[-1:] == ("[key]",):
        return f"{path.removesuffix('.[key]')}: is no name that can be given here: {error['msg']}"
    if kind == "extra_forbidden":
        if now := renamed(path, got):
            return f"{path}: {now}"
        return f"{path}: unknown field{did_you_mean(str(loc[-1]), _siblings(loc))}"
    if kind == "literal_error":
        expected = str(context.get("expected", "")).replace("'", "")
        choices = expected.replace(" or ", ", ").split(", ")
        near = did_you_mean(got, choices) if isinstance(got, str) else ""
        return f"{path}: must be one of {', '.join(choices)}; got {quote(got)}{near}"
    bounds = {"greater_than": (">", "gt"), "greater_than_equal": (">=", "ge")}
    bounds |= {"less_than": ("<", "lt"), "less_than_equal": ("<=", "le")}
    if kind in bounds:
        sign, key = bounds[kind]
        return f"{path}: must be {sign} {context[key]:g}, got {quote(got)}"
    wanted = {
        "int": "a whole number",
        "float": "a number",
        "bool": "true or false",
        "string": "text",
        "list": "a list",
        "dict": "a mapping",
        "model": "a section with fields",
        "finite": "a finite number",
    }
    if kind in ("string_too_short", "too_short"):
        return f"{path}: must not be empty"
    if kind == "value_error":
        reason = str(context.get("error", error["msg"]))
        return f"{path}: {reason}" if loc else reason
    if kind.split("_")[0] in wanted:
        return f"{path}: must be {wanted[kind.split('_')[0]]}, got {quote(got)}"
    return f"{path}: {error['msg']}, got {quote(got)}"


def _siblings(loc: Sequence[int | str]) -> list[str]:
    """Return the names of the fields that are allowed in place of the unknown field `loc`."""
    kind: Any = HeadraceConfig
    for part in loc[:-1]:
        if typing.get_origin(kind) is dict:
            kind = typing.get_args(kind)[1]
            continue
        field = kind.model_fields.get(part) if isinstance(part, str) else None
        kind = field.annotation if field is not None else None
        if typing.get_origin(kind) is not dict and not _is_section(kind):
            return []
    return list(kind.model_fields) if _is_section(kind) else []


def _is_section(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)
