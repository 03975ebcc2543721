"""A StoreNode's settings, checked before it starts."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo, field_validator

from headrace_kvstore.objects.object_format import WRITER
from headrace_kvstore.protocol.membership import MIN_SECRET_CHARACTERS
from headrace_kvstore.protocol.wire import MAX_LEASE_S
from headrace_kvstore.settings.store_settings import ArenaSettings, Flag, Seconds, Size


def is_address(address: str, least_port: int = 1) -> bool:
    """Whether the text is HOST:PORT, with an IPv6 host in brackets."""
    match = re.fullmatch(r"(?:[\w.-]+|\[[0-9a-fA-F:]+\]):(\d{1,5})", address)
    return match is not None and least_port <= int(match[1]) < 65536


def _address(value: str) -> str:
    if not is_address(value):
        raise ValueError("give HOST:PORT")
    return value


def _split(value: Any) -> Any:
    """Return text with commas as a tuple."""
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    return value


Addresses = Annotated[tuple[Annotated[str, AfterValidator(_address)], ...], BeforeValidator(_split)]
Secret = Annotated[str, Field(min_length=MIN_SECRET_CHARACTERS)]
Endpoint = Annotated[str, Field(pattern=r"^(tcp|ipc|inproc)://.")]
ObjectUrl = Annotated[str, Field(pattern=r"^[a-z0-9]+://")]
Writer = Annotated[str, Field(pattern=f"^{WRITER}$")]


class NodeSettings(ArenaSettings):
    """Settings of one node: what it stores, and where.

    Attributes:
        block_bytes, layers: how the arena is cut if this process creates it.
        keep_arena: leave the arena when the node ends. Otherwise a node that ends removes it unless
            another process uses it. At the end of an app it is removed in any case.
        nvme_folder: on a local disk; None for a node without an NVMe tier.
        nvme_bytes: what its files may take.
        nvme_sync: have the disk keep each block for good before it counts as written. Without it, a
            power cut may cost blocks.
        segment_bytes: of one of its files.
        backlog_bytes: blocks that may wait to be written; they stay in the arena until then.
        writing_bytes, reading_bytes: on their way to and from the disk at once.
        sweep_s: least time between looks through the arena for blocks that were not written.
        warm: fill the arena's free room from NVMe at start.
        events, replay: ZeroMQ endpoints to publish KV events at, and to replay them.
        secret: what the app's nodes prove themselves to each other with; the same for all of them.
        listen: HOST:PORT for peers; port 0 takes a free one. None: this node's blocks stay its own.
        peers: HOST:PORT of other nodes to pull blocks from; may name this one too.
        pulling_bytes: on their way from peers at once.
        pull_limit_s: until a pull counts as too slow, and no request waits for it any more.
        peer_lease_s: for how long blocks are leased from a peer; longer than `pull_limit_s`.
        object_url: such as s3://BUCKET/PREFIX or file:///FOLDER; None for no object tier.
        object_options: of its client, such as `endpoint` and `region`; before the environment.
        object_writer: whose objects count as this node's own; None takes `name`. Nodes of one
            writer share `object_bytes` and may remove each other's objects.
        object_bytes: what its own objects may take.
        object_bytes_per_s: what writing them may take of the line, in the mean.
        object_sweep_s: between looks through the arena for blocks worth writing there.
        object_refresh_s: between looks at the next names of objects, which other nodes may have
            written.
        object_timeout_s: of one request.
        gossip_bytes: size of the gossip log, in this process's memory.
        retry_s: time between tries to get a busy folder, or a missing arena.
        heal_s: time until a failed disk is tried again; doubled each time, up to 16 times.
        close_s: how long a clean end may take.
    """

    block_bytes: Size = 2**20
    layers: Annotated[int, Field(ge=1, le=2**16, strict=True)] = 32
    keep_arena: Flag = False
    nvme_folder: Path | None = None
    nvme_bytes: Size = 16 * 2**30
    nvme_sync: Flag = False
    segment_bytes: Size = 256 * 2**20
    backlog_bytes: Size = 2**30
    writing_bytes: Size = 64 * 2**20
    reading_bytes: Size = 64 * 2**20
    sweep_s: Seconds = 30.0
    warm: Flag = False
    events: Endpoint | None = None
    replay: Endpoint | None = None
    secret: Secret | None = Field(default=None, repr=False)
    listen: str | None = None
    peers: Addresses = ()
    pulling_bytes: Size = 256 * 2**20
    pull_limit_s: Seconds = 5.0
    peer_lease_s: Seconds = 20.0
    object_url: ObjectUrl | None = None
    object_options: dict[str, Any] = Field(default_factory=dict, repr=False)
    object_writer: Writer | None = None
    object_bytes: Size = 64 * 2**30
    object_bytes_per_s: Size = 64 * 2**20
    object_sweep_s: Seconds = 10.0
    object_refresh_s: Seconds = 30.0
    object_timeout_s: Seconds = 10.0
    gossip_bytes: Size = 64 * 2**20
    retry_s: Seconds = 5.0
    heal_s: Seconds = 60.0
    close_s: Seconds = 3.0

    @field_validator("listen", "peers")
    @classmethod
    def _peers_know_each_other(cls, value: Any, info: ValidationInfo) -> Any:
        if value and not info.data.get("secret"):
            raise ValueError("give it with secret: nodes that share blocks know each other by that")
        return value

    @field_validator("listen")
    @classmethod
    def _listens_somewhere(cls, value: str | None) -> str | None:
        if value is not None and not is_address(value, least_port=0):
            raise ValueError("give HOST:PORT")
        return value

    @field_validator("peer_lease_s")
    @classmethod
    def _lease_outlives_the_pull(cls, value: float, info: ValidationInfo) -> float:
        limit_s = info.data.get("pull_limit_s", 0.0)
        if not limit_s < value <= MAX_LEASE_S:
            raise ValueError(f"give more than pull_limit_s ({limit_s!r}), at most {MAX_LEASE_S:g}")
        return value
