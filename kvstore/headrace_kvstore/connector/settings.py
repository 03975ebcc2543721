"""The store's settings in `kv_connector_extra_config`, checked before an engine starts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from headrace_kvstore.codec import CODECS
from headrace_kvstore.connector.quotas import Quotas
from headrace_kvstore.policy import shared as policies

_UNITS = {"": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}


class SettingsError(ValueError):
    """A setting is unknown or impossible; the message names it and says what would be right."""


@dataclass(frozen=True, slots=True)
class StoreSettings:
    """One engine's view of its node's store.

    Attributes:
        name: of the node's arena; engines that give the same name share their blocks.
        dram_bytes: the arena's size, tables included; the first engine on the node decides.
        folder: where shared memory is mounted.
        load, save: switch one direction off.
        lease_s: longest time that a load may take before its blocks may be evicted.
        copy_threads: threads that copy blocks in and out.
        depth: layers of a load on their way at once; None measures what it takes.
        staging_bytes: memory that layers from files pass through.
        node: ask the node's StoreNode for what is not in DRAM, where there is one.
        node_timeout_s: longest wait for what it has; other requests go on meanwhile.
        codec: how blocks are stored: raw is exact; fp8 and int4 are not, and shared only with
            engines that say the same.
        priced: load from below DRAM, peers and objects included, only what is predicted to take
            fewer seconds than computing.
        policy: what evicts from the arena; whoever makes it decides.
        quotas: what tenants may hold there; given as `quotas`, sizes by cache salt, and
            `default_quota`.
    """

    name: str = "headrace-kv"
    dram_bytes: int = 2 * 2**30
    folder: Path = Path("/dev/shm")
    load: bool = True
    save: bool = True
    lease_s: float = 30.0
    copy_threads: int = 1
    depth: int | None = None
    staging_bytes: int = 256 * 2**20
    node: bool = True
    node_timeout_s: float = 0.25
    priced: bool = True
    codec: str = "raw"
    policy: str = policies.DEFAULT
    quotas: Quotas = field(default_factory=Quotas)

    @classmethod
    def parse(cls, extra: Mapping[str, Any]) -> StoreSettings:
        """Read a `kv_connector_extra_config`.

        Raises:
            SettingsError: an unknown or impossible value.
        """
        try:
            return cls._read(extra)
        except SettingsError as error:
            raise SettingsError(f"kv_connector_extra_config.{error}") from None

    @classmethod
    def _read(cls, extra: Mapping[str, Any]) -> StoreSettings:
        known = {f.name for f in fields(cls)} | {"default_quota"}
        for key in extra:
            if key not in known:
                raise _wrong(key, "is unknown", f"one of {', '.join(sorted(known))}")
        values = dict(extra)
        values["quotas"] = parse_quotas(values.get("quotas"), values.pop("default_quota", None))
        for name in {"dram_bytes", "staging_bytes"} & set(values):
            values[name] = parse_bytes(name, values[name])
        if "folder" in values:
            values["folder"] = Path(str(values["folder"]))
        settings = cls(**values)
        settings._check()
        return settings

    def _check(self) -> None:
        if self.codec not in CODECS:
            raise _wrong("codec", f"is {self.codec!r}", f"one of {', '.join(CODECS)}")
        if not isinstance(self.name, str) or not re.fullmatch(r"[\w.-]{1,200}", self.name):
            raise _wrong("name", f"is {self.name!r}", "letters, digits, '.', '_' and '-'")
        check_policy(self.policy)
        for name in ("load", "save", "node", "priced"):
            if not isinstance(getattr(self, name), bool):
                raise _wrong(name, f"is {getattr(self, name)!r}", "true or false")
        for name, most_s in (("lease_s", 3600), ("node_timeout_s", 60)):
            value = getattr(self, name)
            if not _number(value) or not 0 < value <= most_s:
                raise _wrong(name, f"is {value!r}", f"seconds from 0 to {most_s}")
        for name, low, high in (("copy_threads", 1, 64), ("depth", 1, 1024)):
            value = getattr(self, name)
            if name == "depth" and value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
                raise _wrong(name, f"is {value!r}", f"a whole number from {low} to {high}")


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
    raise _wrong(name, f"is {value!r}", right)


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
        raise _wrong("quotas", f"is {by_salt!r}", 'sizes by cache salt, as {"tenant": "2GiB"}')
    sizes = {salt: parse_bytes(f"quotas.{salt}", size) for salt, size in by_salt.items()}
    return Quotas(sizes, None if default is None else parse_bytes("default_quota", default))


def check_policy(name: Any) -> None:
    """Raises SettingsError for an eviction policy that there is not."""
    if name not in policies.KINDS:
        raise _wrong("policy", f"is {name!r}", f"one of {', '.join(policies.KINDS)}")


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _wrong(name: str, what: str, right: str) -> SettingsError:
    return SettingsError(f"{name}: {what}; give {right}")
