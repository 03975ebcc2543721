"""The messages between two nodes, over TCP, framed as `wire` frames those of engines.

    Hello  -> Welcome      who are you, and how is your memory read
    Lease  -> Leased       keep these blocks for me, and say where they lie
    Release                done; these blocks did not verify
    ReadNotes -> Notes     new notes of your board (`board`), except those from other boards

Messages hold numbers, names and hashes, no pickle. Addresses lie within the memory that the
owner's NIXL agent has registered. The agent's metadata is NIXL's own binary form. Anyone who
reaches the port can read KV, so it belongs on a network of the cluster's own.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from headrace_kvstore.protocol.wire import (
    MAX_LEASE_S,
    Digest,
    Failed,
    Hash,
    Message,
    Notes,
    ReadNotes,
    WireError,
    frame_decoder,
)

MAX_BLOCKS = 4096
"""In one lease."""

Generation = Annotated[str, Meta(max_length=64)]
Port = Annotated[int, Meta(ge=0, le=65535)]


class Hello(Message):
    """Answered by `Welcome`."""


class Lease(Message):
    """Keep blocks for `lease_s`, brought to DRAM first if need be; answered by `Leased`.

    `generation` is the owner's as the reader knows it: another one is answered by `Failed`.
    """

    generation: Generation
    digest: Digest
    layers: int
    layer_bytes: int
    hashes: Annotated[list[Hash], Meta(max_length=MAX_BLOCKS)]
    lease_s: Annotated[float, Meta(ge=0.0, le=MAX_LEASE_S)]


class Release(Message):
    """End a lease; `bad` are positions in its rows whose bytes did not verify. No answer."""

    lease: int
    bad: list[int] = []


PeerRequest = Hello | Lease | Release | ReadNotes


class Welcome(Message):
    """`generation`: changes whenever addresses may have changed. `agent`: NIXL's metadata.
    `events`, `replay`: ports on the same host, 0 if they cannot be followed; `batches`: how many
    batches of events there were."""

    generation: Generation
    agent: bytes
    events: Port
    replay: Port
    batches: int


class Row(msgspec.Struct, array_like=True):
    """One leased block: which of those asked for, where it is, and its place in the prefix."""

    index: int
    address: int
    parent: int
    depth: int
    tenant: int
    priority: int
    compute_s: float


class Leased(Message):
    """`rows`: blocks that are kept. `sums`: u64 (rows, layers), little-endian."""

    lease: int = 0
    rows: list[Row] = []
    sums: bytes = b""


PeerReply = Welcome | Leased | Notes | Failed

decode_request = frame_decoder(PeerRequest)
"""Id and body of a frame that a reader sent. Raises WireError."""
decode_reply = frame_decoder(PeerReply)
"""Id and body of a frame that an owner sent. Raises WireError."""


__all__ = ["Failed", "WireError", "decode_reply", "decode_request"]
