"""The messages between two nodes, over TCP, framed as `wire` frames those of engines.

    HandshakeRequest -> HandshakeResponse  the owner's generation, and NIXL's metadata of its memory
    PollRequest -> PollResponse            new entries of its gossip log, and new batches of its
    events Lease -> Leased                        keep these blocks for the reader, and return their
    addresses GetTags -> Tags                        the keyed tags of a lease's blocks
    (`block_tags`) Release                                end a lease; these blocks did not verify

Messages hold numbers, names and hashes, no pickle. Addresses lie within the memory that the
owner's NIXL agent has registered. The agent's metadata is NIXL's own binary form. Only members of
the app exchange messages (`membership`).
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from headrace_kvstore.peers.block_tags import TAG_BYTES
from headrace_kvstore.protocol.gossip_log import EntryPage, Number
from headrace_kvstore.protocol.wire import (
    MAX_LEASE_S,
    Digest,
    Failed,
    Hash,
    Message,
    Seconds,
    frame_decoder,
)

MAX_BLOCKS = 1024
"""Maximum number of blocks in one lease."""
MAX_POLL_BYTES = 2**22

Generation = Annotated[str, Meta(max_length=64)]
Small = Annotated[int, Meta(ge=0, lt=2**32)]
Word = Annotated[int, Meta(ge=0)]
"""Up to 64 bits, the largest that msgpack carries."""


class HandshakeRequest(Message):
    """Handshake of a reader. Answered by `HandshakeResponse`."""


class PollRequest(Message):
    """Request for the log's entries after a place, and for the batches of events from a number
    on. Answered by `PollResponse`."""

    gossip_log: Generation
    after: Number
    batch: Number
    most_bytes: Annotated[int, Meta(ge=0, le=MAX_POLL_BYTES)]
    """Maximum size of the entries, and of the batches as well. A single larger one is sent
    nevertheless."""


class Lease(Message):
    """Request to keep blocks for `lease_s`, after bringing them to DRAM if need be. Answered by
    `Leased`.

    `generation` is the owner's as the reader knows it. If it is wrong, the answer is `Failed`.
    """

    generation: Generation
    digest: Digest
    layers: Annotated[int, Meta(ge=1, le=2**16)]
    layer_bytes: Annotated[int, Meta(ge=1, le=2**40)]
    hashes: Annotated[list[Hash], Meta(max_length=MAX_BLOCKS)]
    lease_s: Annotated[float, Meta(ge=0.0, le=MAX_LEASE_S)]


class Release(Message):
    """End of a lease; `bad` are positions in its rows whose bytes did not verify. No answer."""

    lease: Number
    bad: Annotated[list[Small], Meta(max_length=MAX_BLOCKS)] = []


class GetTags(Message):
    """Request for the tags of a lease's blocks. Answered by `Tags`, after the owner has compared
    the blocks with their sums."""

    lease: Number


PeerRequest = HandshakeRequest | PollRequest | Lease | GetTags | Release


class HandshakeResponse(Message):
    """Answer to `HandshakeRequest`. `generation`: changes whenever addresses may have changed.
    `agent`: NIXL's metadata."""

    generation: Generation
    agent: Annotated[bytes, Meta(max_length=2**20)]


class PollResponse(Message):
    """Answer to `PollRequest`. `first`: number of the first of `batches`, each an
    `events.EventBatch`; `next`: number of the next batch to come."""

    generation: Generation
    entries: EntryPage
    first: Number
    batches: list[bytes]
    next: Number


class LeasedBlock(msgspec.Struct, array_like=True):
    """One leased block: its index among those asked for, its address, and its place in the
    prefix."""

    index: Small
    address: Word
    parent: Word
    depth: Small
    tenant: Small
    compute_s: Seconds


class Leased(Message):
    """Answer to `Lease`. `rows`: blocks that are kept. `sums`: u64 (rows, layers),
    little-endian."""

    lease: Number = 0
    rows: Annotated[list[LeasedBlock], Meta(max_length=MAX_BLOCKS)] = []
    sums: bytes = b""


class Tags(Message):
    """Tags of a lease, one a row, joined."""

    tags: Annotated[bytes, Meta(max_length=MAX_BLOCKS * TAG_BYTES)]


PeerReply = HandshakeResponse | PollResponse | Leased | Tags | Failed

decode_request = frame_decoder(PeerRequest)
"""Decoder of a reader's frame into its id and body. Raises WireError."""
decode_reply = frame_decoder(PeerReply)
"""Decoder of an owner's frame into its id and body. Raises WireError."""
