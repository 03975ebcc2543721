"""The store's settings in `kv_connector_extra_config`, checked before an engine starts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from headrace_kvstore.codec import CODECS
from headrace_kvstore.policy import shared as policies
from headrace_kvstore.policy.quotas import Quotas
from headrace_kvstore.settings import (
    SettingsError,
    check_policy,
    is_number,
    parse_bytes,
    parse_quotas,
    wrong,
)


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
                raise wrong(key, "is unknown", f"one of {', '.join(sorted(known))}")
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
            raise wrong("codec", f"is {self.codec!r}", f"one of {', '.join(CODECS)}")
        if not isinstance(self.name, str) or not re.fullmatch(r"[\w.-]{1,200}", self.name):
            raise wrong("name", f"is {self.name!r}", "letters, digits, '.', '_' and '-'")
        check_policy(self.policy)
        for name in ("load", "save", "node", "priced"):
            if not isinstance(getattr(self, name), bool):
                raise wrong(name, f"is {getattr(self, name)!r}", "true or false")
        for name, most_s in (("lease_s", 3600), ("node_timeout_s", 60)):
            value = getattr(self, name)
            if not is_number(value) or not 0 < value <= most_s:
                raise wrong(name, f"is {value!r}", f"seconds from 0 to {most_s}")
        value = self.copy_threads
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= 64:
            raise wrong("copy_threads", f"is {value!r}", "a whole number from 1 to 64")
