"""Settings of the store: the types of their values, and the errors that wrong values cause.

Engines (`connector.store_settings`) and nodes (`node_settings`) read theirs with `parse`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import PydanticCustomError

from headrace_kvstore.policy import shared as policies
from headrace_kvstore.table import tenant_number

_UNITS = {"": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}


class SettingsError(ValueError):
    """A setting is unknown or impossible; the message names it and says what would be right."""


def wrong(right: str) -> PydanticCustomError:
    """What a validator raises; `right` says what to give instead."""
    return PydanticCustomError("wrong", "{right}", {"right": right})


def check(test: Callable[[Any], bool], right: str) -> BeforeValidator:
    """Refuses each value that does not pass a test; `right` says what to give instead."""

    def checked(value: Any) -> Any:
        if not test(value):
            raise wrong(right)
        return value

    return BeforeValidator(checked)


def matching(pattern: str, right: str) -> BeforeValidator:
    """Refuses what is no text of this pattern."""
    return check(lambda v: isinstance(v, str) and bool(re.fullmatch(pattern, v)), right)


def one_of(names: Iterable[str]) -> BeforeValidator:
    """Refuses all but these names."""
    known = list(names)
    return check(lambda value: value in known, f"one of {', '.join(known)}")


def whole(low: int, high: int) -> BeforeValidator:
    """Refuses all but whole numbers within bounds."""
    right = f"a whole number from {low} to {high}"
    return check(lambda value: type(value) is int and low <= value <= high, right)


def seconds(most: float = math.inf) -> BeforeValidator:
    """Refuses all but numbers above 0, `most` at most."""
    right = "seconds above 0" if math.isinf(most) else f"seconds from 0 to {most:g}"
    return check(lambda value: type(value) in (int, float) and 0 < value <= most, right)


def parse_bytes(value: Any) -> int:
    """A size: a whole number of bytes above 0, or text such as "512MiB" or "2GiB"."""
    if type(value) is int and value > 0:
        return value
    if isinstance(value, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", value.lower())
        if match and match[2] in _UNITS and float(match[1]) > 0:
            return int(float(match[1]) * _UNITS[match[2]])
    raise wrong('a number of bytes, or text such as "512MiB" or "2GiB"')


def _is_by_salt(value: Any) -> bool:
    return isinstance(value, Mapping) and all(isinstance(salt, str) and salt for salt in value)


Size = Annotated[int, BeforeValidator(parse_bytes)]
Seconds = Annotated[float, seconds()]
Flag = Annotated[bool, check(lambda value: isinstance(value, bool), "true or false")]
Name = Annotated[str, matching(r"[\w.-]{1,200}", "letters, digits, '.', '_' and '-', 200 at most")]
BySalt = Annotated[dict[str, Size], check(_is_by_salt, 'sizes by cache salt, as {"acme": "2GiB"}')]


class ArenaSettings(BaseModel):
    """What every process of an arena says of it; the process that creates the arena decides.

    Attributes:
        name: of the arena; processes that give the same name share its blocks.
        dram_bytes: its size, tables included.
        folder: where shared memory is mounted.
        policy: which blocks are evicted first.
        quotas: bytes that tenants may hold, by cache salt. Requests without a salt belong to no
            tenant and have no quota.
        default_quota: bytes for each salt that is not listed; None for no limit.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)

    name: Name = "headrace-kv"
    dram_bytes: Size = 2 * 2**30
    folder: Path = Path("/dev/shm")
    policy: Annotated[str, one_of(policies.KINDS)] = policies.DEFAULT
    quotas: BySalt = Field(default_factory=dict)
    default_quota: Size | None = None

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> Self:
        """Read a mapping, such as a configuration file's. Sizes may be text such as "2GiB".

        Raises:
            SettingsError: an unknown or impossible value.
        """
        try:
            return cls(**values)
        except ValidationError as error:
            first = error.errors()[0]
            path = ".".join(str(part) for part in first["loc"])
            if first["type"] == "extra_forbidden":
                known = ", ".join(sorted(cls.model_fields))
                raise SettingsError(f"{path}: is unknown; give one of {known}") from None
            raise SettingsError(f"{path}: is {first['input']!r}; give {first['msg']}") from None

    @property
    def quota_options(self) -> dict[str, Any]:
        """The quotas as the arena takes them."""
        return {
            "quotas": {tenant_number(salt): size for salt, size in self.quotas.items()},
            "default_quota": self.default_quota,
        }
