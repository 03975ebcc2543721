"""`headrace config diff`: the fields of a configuration that differ from the defaults."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from headrace.config import HeadraceConfig
from headrace.config.models import MODEL_SECTIONS


class Difference(NamedTuple):
    """A field that differs.

    Attributes:
        value: in the configuration. default: without one.
    """

    field: str
    value: Any
    default: Any


def differences(data: Mapping[str, Any]) -> list[Difference]:
    """Return the fields of a configuration's plain data that differ from the defaults; of several
    models, those that differ from the top level."""
    default = HeadraceConfig().model_dump()
    top = {name: data[name] for name in MODEL_SECTIONS}
    default["models"] = {
        key: top | {"model": {**data["model"], "id": key, "source": None}} for key in data["models"]
    }
    return list(_compare(data, default, ""))


def _compare(
    mine: Mapping[str, Any], default: Mapping[str, Any], path: str
) -> Iterator[Difference]:
    for name in dict.fromkeys((*mine, *default)):
        value, usual = mine.get(name), default.get(name)
        if isinstance(value, Mapping) and isinstance(usual, Mapping):
            yield from _compare(value, usual, f"{path}{name}.")
        elif value != usual:
            yield Difference(f"{path}{name}", value, usual)
