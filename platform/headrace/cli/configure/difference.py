"""`headrace config diff`: the fields of a configuration that differ from the defaults."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from headrace.config import HeadraceConfig


class Difference(NamedTuple):
    """A field that differs.

    Attributes:
        value: in the configuration. default: without one.
    """

    field: str
    value: Any
    default: Any


def differences(data: Mapping[str, Any]) -> list[Difference]:
    """Return the fields of a configuration's plain data that differ from the defaults."""
    return list(_compare(data, HeadraceConfig().model_dump(), ""))


def _compare(
    mine: Mapping[str, Any], default: Mapping[str, Any], path: str
) -> Iterator[Difference]:
    for name in dict.fromkeys((*mine, *default)):
        value, usual = mine.get(name), default.get(name)
        if isinstance(value, Mapping) and isinstance(usual, Mapping):
            yield from _compare(value, usual, f"{path}{name}.")
        elif value != usual:
            yield Difference(f"{path}{name}", value, usual)
