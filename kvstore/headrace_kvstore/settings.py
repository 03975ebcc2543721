"""How settings of the store are read and checked, for engines and nodes alike."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from headrace_kvstore.policy import shared as policies
from headrace_kvstore.policy.quotas import Quotas

_UNITS = {"": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}


class SettingsError(ValueError):
    """A setting is unknown or impossible; the message names it and says what would be right."""


def parse_bytes(name: str, value: Any) -> int:
    """A size: a whole number of bytes, or text such as "512MiB" or "2GiB".

    Raises:
        SettingsError: it is neither, or not positive.
    """
    right = 'a number of bytes, or text such as "512MiB" or "2GiB"'
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    if isinstance(value, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", value.lower())
        if match and match[2] in _UNITS and float(match[1]) > 0:
            return int(float(match[1]) * _UNITS[match[2]])
    raise wrong(name, f"is {value!r}", right)


def parse_quotas(by_salt: Any, default: Any) -> Quotas:
    """The settings `quotas` and `default_quota`, each None where it is not given.

    Raises:
        SettingsError: no mapping of salts to sizes, or no size.
    """
    if by_salt is None:
        by_salt = {}
    if not isinstance(by_salt, Mapping) or not all(
        isinstance(salt, str) and salt for salt in by_salt
    ):
        raise wrong("quotas", f"is {by_salt!r}", 'sizes by cache salt, as {"tenant": "2GiB"}')
    sizes = {salt: parse_bytes(f"quotas.{salt}", size) for salt, size in by_salt.items()}
    return Quotas(sizes, None if default is None else parse_bytes("default_quota", default))


def check_policy(name: Any) -> None:
    """Raises SettingsError for an eviction policy that there is not."""
    if name not in policies.KINDS:
        raise wrong("policy", f"is {name!r}", f"one of {', '.join(policies.KINDS)}")


def is_number(value: Any) -> bool:
    """Whether it is a number; bool is none."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def wrong(name: str, what: str, right: str) -> SettingsError:
    """The error for a setting that has a wrong value."""
    return SettingsError(f"{name}: {what}; give {right}")
