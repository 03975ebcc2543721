"""A StoreNode's settings, checked before it starts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from headrace_kvstore.objects.object_format import WRITER
from headrace_kvstore.policy import shared as policies
from headrace_kvstore.policy.quotas import Quotas
from headrace_kvstore.protocol.wire import MAX_LEASE_S
from headrace_kvstore.settings import (
    SettingsError,
    check_policy,
    parse_bytes,
    parse_quotas,
)

_SIZES = (
    *("dram_bytes", "nvme_bytes", "segment_bytes", "block_bytes"),
    *("backlog_bytes", "writing_bytes", "reading_bytes", "pulling_bytes"),
    *("object_bytes", "object_part_bytes", "object_bytes_per_s", "board_bytes"),
)
_TIMES = (
    *("sweep_s", "retry_s", "heal_s", "close_s", "pull_limit_s", "peer_lease_s"),
    *("object_sweep_s", "object_refresh_s", "object_timeout_s"),
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
        listen: HOST:PORT for peers; port 0 takes a free one. None: this node's blocks stay its own.
        peers: HOST:PORT of other nodes to pull blocks from; may name this one too.
        pulling_bytes: on their way from peers at once.
        pull_limit_s: until a pull counts as too slow, and nobody waits for it any more.
        peer_lease_s: for how long blocks are leased from a peer; longer than `pull_limit_s`.
        object_url: such as s3://BUCKET/PREFIX or file:///FOLDER; None for no object tier.
        object_options: of its client, such as `endpoint` and `region`; before the environment.
        object_writer: whose objects count as this node's own; None takes `name`. Nodes of one
            writer share `object_bytes` and may remove each other's objects.
        object_bytes: what its own objects may take.
        object_part_bytes: size of one object, about; at least one block.
        object_bytes_per_s: what writing them may take of the line, in the mean.
        object_sweep_s: between looks through the arena for blocks worth writing there.
        object_refresh_s: between looks for what others have written.
        object_timeout_s: of one request.
        board_bytes: for what engines leave for each other (`board`), in this process's memory.
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
    listen: str | None = None
    peers: tuple[str, ...] = ()
    pulling_bytes: int = 256 * 2**20
    pull_limit_s: float = 5.0
    peer_lease_s: float = 20.0
    object_url: str | None = None
    object_options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    object_writer: str | None = None
    object_bytes: int = 64 * 2**30
    object_part_bytes: int = 16 * 2**20
    object_bytes_per_s: int = 64 * 2**20
    object_sweep_s: float = 10.0
    object_refresh_s: float = 30.0
    object_timeout_s: float = 10.0
    board_bytes: int = 64 * 2**20
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
            elif name == "peers":
                read[name] = _addresses(value)
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
        for name in _TIMES:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
                raise SettingsError(f"{name}: is {value!r}; give seconds above 0")
        for name in ("events", "replay"):
            value = getattr(self, name)
            if value is not None and not re.match(r"(tcp|ipc|inproc)://.", str(value)):
                raise SettingsError(f"{name}: is {value!r}; give tcp://HOST:PORT or ipc://PATH")
        if self.peer_lease_s <= self.pull_limit_s or self.peer_lease_s > MAX_LEASE_S:
            raise SettingsError(
                f"peer_lease_s: is {self.peer_lease_s!r}; give more than pull_limit_s "
                f"({self.pull_limit_s!r}) and at most {MAX_LEASE_S:g}"
            )
        self._check_objects()
        if self.listen is not None and not is_address(self.listen, least_port=0):
            raise SettingsError(f"listen: is {self.listen!r}; give HOST:PORT")
        for address in self.peers:
            if not is_address(address):
                raise SettingsError(f"peers: {address!r} is no HOST:PORT")
        if isinstance(self.layers, bool) or not isinstance(self.layers, int) or self.layers < 1:
            raise SettingsError(f"layers: is {self.layers!r}; give a whole number above 0")

    def _check_objects(self) -> None:
        if self.object_url is not None and not re.match(r"[a-z0-9]+://", str(self.object_url)):
            raise SettingsError(
                f"object_url: is {self.object_url!r}; give s3://BUCKET/PREFIX or file:///FOLDER"
            )
        if not isinstance(self.object_options, Mapping):
            raise SettingsError("object_options: is no mapping; give names and values")
        if self.object_writer is not None and not re.fullmatch(WRITER, str(self.object_writer)):
            raise SettingsError(
                f"object_writer: is {self.object_writer!r}; give letters, digits, '_' and '-', "
                "64 at most"
            )


def is_address(address: object, least_port: int = 1) -> bool:
    """Whether it is HOST:PORT; an IPv6 host stands in brackets."""
    match = re.fullmatch(r"(?:[\w.-]+|\[[0-9a-fA-F:]+\]):(\d{1,5})", str(address))
    return match is not None and least_port <= int(match[1]) < 65536


def _addresses(value: Any) -> tuple[str, ...]:
    """A list, or text with commas."""
    if isinstance(value, str):
        value = [part.strip() for part in value.split(",") if part.strip()]
    if not isinstance(value, list | tuple):
        raise SettingsError(f"peers: is {value!r}; give a list of HOST:PORT")
    return tuple(str(each) for each in value)
