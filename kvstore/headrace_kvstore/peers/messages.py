"""The messages between two nodes, over TCP, framed as `wire` frames those of engines.

    Hello  -> Welcome      who are you, and how is your memory read
    Look   -> News         new notes of your board, and new batches of your events
    Lease  -> Leased       keep these blocks for me, and say where they lie
    GetTags -> Tags        the keyed tags of a lease's blocks (`tags`)
    Release                done; these blocks did not verify

Messages hold numbers, names and hashes, no pickle. Addresses lie within the memory that the
owner's NIXL agent has registered. The agent's metadata is NIXL's own binary form. Only members of
the app exchange messages (`membership`).
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from headrace_kvstore.peers.tags import TAG_BYTES
from headrace_kvstore.protocol.board import Number
from headrace_kvstore.protocol.wire import (
    MAX_LEASE_S,
    Digest,
    Failed,
    Hash,
    Message,
    Notes,
    Seconds,
    frame_decoder,
)

MAX_BLOCKS = 1024
"""In one lease."""
MAX_LOOK_BYTES = 2**22

Generation = Annotated[str, Meta(max_length=64)]
Small = Annotated[int, Meta(ge=0, lt=2**32)]
Word = Annotated[int, Meta(ge=0)]
"""Up to 64 bits, the largest that msgpack carries."""


class Hello(Message):
    """Answered by `Welcome`."""


class Look(Message):
    """Answered by `News`: notes behind a place on the board, batches of events from a number on."""

    board: Generation
    after: Number
    batch: Number
    most_bytes: Annotated[int, Meta(ge=0, le=MAX_LOOK_BYTES)]
    """For notes, and as much again for batches. A single larger one is sent all the same."""


class Lease(Message):
    """Keep blocks for `lease_s`, brought to DRAM first if need be; answered by `Leased`.

    `generation` is the owner's as the reader knows it: another one is answered by `Failed`.
    """

    generation: Generation
    digest: Digest
    layers: Annotated[int, Meta(ge=1, le=2**16)]
    layer_bytes: Annotated[int, Meta(ge=1, le=2**40)]
    hashes: Annotated[list[Hash], Meta(max_length=MAX_BLOCKS)]
    lease_s: Annotated[float, Meta(ge=0.0, le=MAX_LEASE_S)]


class Release(Message):
    """End a lease; `bad` are positions in its rows whose bytes did not verify. No answer."""

    lease: Number
    bad: Annotated[list[Small], Meta(max_length=MAX_BLOCKS)] = []


class GetTags(Message):
    """Answered by `Tags`, once the owner has compared the blocks of a lease with their sums."""

    lease: Number


PeerRequest = Hello | Look | Lease | GetTags | Release


class Welcome(Message):
    """`generation`: changes whenever addresses may have changed. `agent`: NIXL's metadata."""

    generation: Generation
    agent: Annotated[bytes, Meta(max_length=2**20)]


class News(Message):
    """`first`: number of the first of `batches`, each an `events.EventBatch`; `next`: of the next
    one that there will be."""

    generation: Generation
    notes: Notes
    first: Number
    batches: list[bytes]
    next: Number


class Row(msgspec.Struct, array_like=True):
    """One leased block: which of those asked for, where it is, and its place in the prefix."""

    index: Small
    address: Word
    parent: Word
    depth: Small
    tenant: Small
    compute_s: Seconds


class Leased(Message):
    """`rows`: blocks that are kept. `sums`: u64 (rows, layers), little-endian."""

    lease: Number = 0
    rows: Annotated[list[Row], Meta(max_length=MAX_BLOCKS)] = []
    sums: bytes = b""


class Tags(Message):
    """One a row of the lease, joined."""

    tags: Annotated[bytes, Meta(max_length=MAX_BLOCKS * TAG_BYTES)]


PeerReply = Welcome | News | Leased | Tags | Failed

decode_request = frame_decoder(PeerRequest)
"""Id and body of a frame that a reader sent. Raises WireError."""
decode_reply = frame_decoder(PeerReply)
"""Id and body of a frame that an owner sent. Raises WireError."""
