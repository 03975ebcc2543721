"""A StoreNode's settings, checked before it starts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from headrace_kvstore.connector.quotas import Quotas
from headrace_kvstore.connector.settings import (
    SettingsError,
    check_policy,
    parse_bytes,
    parse_quotas,
)
from headrace_kvstore.policy import shared as policies

_SIZES = (
    *("dram_bytes", "nvme_bytes", "segment_bytes", "block_bytes"),
    *("backlog_bytes", "writing_bytes", "reading_bytes"),
)
_PATHS = ("folder", "nvme_folder", "socket_folder")


@dataclass(frozen=True, slots=True)
class NodeSettings:
    """What one node stores, where.

    Attributes:
        name: of the arena, as in the engines' settings.
        dram_bytes, block_bytes, layers: the arena's size and cut if this process makes it.
        folder: where shared memory is mounted.
        policy: what evicts from the arena, if this process makes it.
        quotas: what tenants may hold there; given as `quotas`, sizes by cache salt, and
            `default_quota`.
        keep_arena: leave the arena when the node ends, for engines and the next node.
        nvme_folder: on a local disk; None for a node without an NVMe tier.
        nvme_bytes: what its files may take.
        segment_bytes: of one of its files.
        backlog_bytes: blocks that may wait to be written; they stay in the arena meanwhile.
        writing_bytes, reading_bytes: on their way to and from the disk at once.
        sweep_s: least time between looks through the arena for blocks that were not written.
        warm: fill the arena's free room from NVMe at start.
        events, replay: ZeroMQ endpoints to publish KV events at, and to replay them.
        socket_folder: of the node's own socket; None for the system's temporary folder.
        retry_s: time between tries to get a busy folder, or a missing arena.
        heal_s: time until a failed disk is tried again; doubled each time, up to 16 times.
        close_s: how long a clean end may take.
    """

    name: str = "headrace-kv"
    dram_bytes: int = 2 * 2**30
    block_bytes: int = 2**20
    layers: int = 32
    folder: Path = Path("/dev/shm")
    policy: str = policies.DEFAULT
    quotas: Quotas = field(default_factory=Quotas)
    keep_arena: bool = False
    nvme_folder: Path | None = None
    nvme_bytes: int = 16 * 2**30
    segment_bytes: int = 256 * 2**20
    backlog_bytes: int = 2**30
    writing_bytes: int = 64 * 2**20
    reading_bytes: int = 64 * 2**20
    sweep_s: float = 30.0
    warm: bool = False
    events: str | None = None
    replay: str | None = None
    socket_folder: Path | None = None
    retry_s: float = 5.0
    heal_s: float = 60.0
    close_s: float = 3.0

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> NodeSettings:
        """Read a mapping, such as a configuration file's. Sizes may be text such as "2GiB".

        Raises:
            SettingsError: an unknown or impossible value.
        """
        known = {f.name for f in fields(cls)} | {"default_quota"}
        rest = dict(values)
        quotas = parse_quotas(rest.pop("quotas", None), rest.pop("default_quota", None))
        read: dict[str, Any] = {"quotas": quotas}
        for name, value in rest.items():
            if name not in known:
                raise SettingsError(f"{name}: is unknown; give one of {', '.join(sorted(known))}")
            if name in _SIZES:
                read[name] = parse_bytes(name, value)
            elif name in _PATHS:
                read[name] = None if value is None else Path(str(value))
            else:
                read[name] = value
        settings = cls(**read)
        settings._check()
        return settings

    def _check(self) -> None:
        if not isinstance(self.name, str) or not re.fullmatch(r"[\w.-]{1,200}", self.name):
            raise SettingsError(
                f"name: is {self.name!r}; give letters, digits, '.', '_' and '-', 200 at most"
            )
        check_policy(self.policy)
        for name in ("keep_arena", "warm"):
            if not isinstance(getattr(self, name), bool):
                raise SettingsError(f"{name}: is {getattr(self, name)!r}; give true or false")
        for name in ("sweep_s", "retry_s", "heal_s", "close_s"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
                raise SettingsError(f"{name}: is {value!r}; give seconds above 0")
        for name in ("events", "replay"):
            value = getattr(self, name)
            if value is not None and not re.match(r"(tcp|ipc|inproc)://.", str(value)):
                raise SettingsError(f"{name}: is {value!r}; give tcp://HOST:PORT or ipc://PATH")
        if isinstance(self.layers, bool) or not isinstance(self.layers, int) or self.layers < 1:
            raise SettingsError(f"layers: is {self.layers!r}; give a whole number above 0")
