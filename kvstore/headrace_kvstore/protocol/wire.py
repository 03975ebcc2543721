"""The messages between a StoreNode and its clients, and the path of the socket between them.

The socket is a Unix socket (ZeroMQ: ROUTER in the node, DEALER in clients) in the system's
temporary folder. Only its owner may use it. A message is one frame of msgpack:

    [protocol version, id, body]        body = [kind, field, ...]

A reply carries the id of its request; id 0 asks for no reply. A request that cannot be read is
answered by `Failed`. Messages hold plain values, no code and no pickle. They never hold KV bytes:
readers get places in files and read the files themselves.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta

from headrace_kvstore.blocks.slot_record import HASH_BYTES
from headrace_kvstore.nvme.record import DIGEST_BYTES, BlockShape, padded
from headrace_kvstore.nvme.segment import Location
from headrace_kvstore.protocol.gossip_log import EntryPage, GossipEntry, Name, Number

PROTOCOL = 6
"""Version, incremented when a message changes its meaning; other versions are answered by
`Failed`."""
NO_REPLY = 0
"""Id of a request whose sender waits for no reply."""
MAX_MESSAGE_BYTES = 64 * 2**20
"""Maximum size of a reply."""
MAX_REQUEST_BYTES = 4 * 2**20
MAX_PATH_BYTES = 107
"""Maximum length of a Unix socket's path: 108 bytes with the zero at its end."""
MAX_LEASE_S = 600.0
MAX_REPORTED = 256
"""Maximum number of bad blocks in one report. The node reads each of them again."""

Digest = Annotated[bytes, Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]
Medium = Annotated[str, Meta(pattern="^(dram|nvme|remote|object)$")]
Hash = Annotated[bytes, Meta(min_length=1, max_length=HASH_BYTES)]
Hashes = Annotated[list[Hash], Meta(max_length=2**16)]
Index = Annotated[int, Meta(ge=0)]
Seconds = Annotated[float, Meta(ge=0.0, le=1e9)]


class WireError(ValueError):
    """A message that cannot be read. `id` is its own as far as that was readable, else NO_REPLY."""

    def __init__(self, reason: str, id: int = NO_REPLY) -> None:
        super().__init__(reason)
        self.id = id


class Message(msgspec.Struct, array_like=True, tag=str.lower):
    """Base of all bodies."""


class Locate(Message):
    """Question which leading blocks can be read from NVMe. Answered by `Located`, twice if peers
    have more.

    `request_key` names the request that asks: a block that two requests asked for counts as reused.
    `compute_s`: seconds that the engine takes to compute one of the blocks, 0 if unknown.
    """

    request_key: Annotated[str, Meta(max_length=1024)]
    digest: Digest
    hashes: Hashes
    lease_s: Annotated[float, Meta(ge=0.0, le=MAX_LEASE_S)]
    compute_s: Seconds = 0.0


class Lookup(Message):
    """Question where these blocks, from the first on, would come from. Answered by `LookupReply`.

    `compute_s`: seconds to compute one of the blocks; blocks that are slower to pull are left out.
    """

    digest: Digest
    hashes: Hashes
    compute_s: Seconds = 0.0


class FindHeld(Message):
    """Question which of these blocks a tier below DRAM has, of this node or of its peers. Answered
    by `HeldBlocks`."""

    digest: Digest
    hashes: Hashes


class BadBlock(msgspec.Struct, array_like=True, frozen=True):
    """A block in a segment file that a reader could not use."""

    hash: Hash
    path: str
    slot: Index

    @classmethod
    def at(cls, place: Location) -> BadBlock:
        """Return the report of a block at this place."""
        return cls(place.hash, place.path, place.slot)


class ReportBad(Message):
    """Check blocks that a reader could not use, and drop those from NVMe that are damaged there.
    `Done`: how many were dropped."""

    digest: Digest
    blocks: Annotated[list[BadBlock], Meta(max_length=MAX_REPORTED)]


class GetStats(Message):
    """Answered by `Stats`."""


class AppendEntry(Message):
    """Append an entry to the node's log (`GossipLog.append`), unless the log has another generation
    than the one given. Answered by an empty `EntryPage`."""

    generation: Annotated[str, Meta(max_length=64)]
    entry: GossipEntry


class ReadEntries(Message):
    """Request for the new entries of the node's log (`GossipLog.read`). Answered by `EntryPage`."""

    generation: Annotated[str, Meta(max_length=64)]
    after: Number
    most_bytes: Annotated[int, Meta(ge=0, le=MAX_MESSAGE_BYTES // 2)]
    except_writer: Name = b""


class Administer(Message):
    """An operator's request (`node.administration`). Answered by `Stats`."""

    action: Annotated[str, Meta(pattern="^(pins|unpin|clear|lookup)$")]
    namespace: Digest | None = None
    hash: Hash | None = None


Request = Locate | Lookup | FindHeld | ReportBad | GetStats | AppendEntry | ReadEntries | Administer


SLOW = (ReportBad, GetStats, Administer)
"""Requests that may take long."""


class Done(Message):
    """Confirmation that a request was carried out or queued; `blocks` as the request says."""

    blocks: int = 0


class Place(msgspec.Struct, array_like=True):
    """A block in a segment file; `sums`: one u64 a layer, little-endian."""

    path: str
    segment: Index
    slot: Index
    sums: bytes


class Located(Message):
    """A leading run of blocks of one shape.

    `pulling`: number of blocks after them that are being pulled into DRAM from a peer. Another
    `Located` follows under the same id when the pull is over, and is worth waiting `wait_s` for.
    """

    layers: int = 0
    layer_bytes: int = 0
    places: list[Place] = []
    pulling: int = 0
    wait_s: float = 0.0


class LookupReply(Message):
    """A leading run of blocks: (medium, blocks, predicted seconds until engines can load them), as
    `availability.AvailableRun`. `below`: whether there is any tier below DRAM; if not, asking makes
    no sense."""

    runs: list[tuple[Medium, Annotated[int, Meta(ge=1)], Annotated[float, Meta(ge=0.0)]]] = []
    below: bool = True


class HeldBlocks(Message):
    """Positions, in the question, of the blocks that a tier has, in ascending order."""

    positions: Annotated[list[Index], Meta(max_length=2**16)] = []


class Stats(Message):
    """Statistics of the node; see `Operations.stats`."""

    values: dict[str, Any]


class Failed(Message):
    """The request was not understood, or not carried out."""

    reason: str


Body = Message | EntryPage
Reply = Done | Located | LookupReply | HeldBlocks | Stats | EntryPage | Failed


class _Envelope(msgspec.Struct, array_like=True):
    version: int
    id: int
    body: msgspec.Raw


_encoder = msgspec.msgpack.Encoder()
_envelopes = msgspec.msgpack.Decoder(_Envelope)


def encode(id: int, body: Body) -> bytes:
    """Return a message as one frame."""
    return _encoder.encode((PROTOCOL, id, body))


Decode = Callable[[bytes], tuple[int, Any]]


def frame_decoder(body: Any) -> Decode:
    """Return a function that decodes a frame into its id and its body, of one of these types. It
    raises WireError."""
    decoder = msgspec.msgpack.Decoder(body)

    def decode(frame: bytes) -> tuple[int, Any]:
        try:
            envelope = _envelopes.decode(frame)
        except (ValueError, RecursionError) as error:
            raise WireError(f"not a message: {error}") from error
        if envelope.version != PROTOCOL:
            raise WireError(f"protocol {envelope.version} is spoken, not {PROTOCOL}", envelope.id)
        try:
            return envelope.id, decoder.decode(envelope.body)
        except (ValueError, RecursionError) as error:  # msgspec's own are ValueErrors
            raise WireError(str(error), envelope.id) from error

    return decode


decode_request = frame_decoder(Request)
decode_reply = frame_decoder(Reply)


def pack_locations(locations: Sequence[Location]) -> Located:
    """Return the message for blocks of one shape."""
    if not locations:
        return Located()
    shape = locations[0].shape
    places = [
        Place(each.path, each.segment, each.slot, each.sums.astype("<u8").tobytes())
        for each in locations
    ]
    return Located(shape.layers, shape.layer_bytes, places)


def unpack_locations(located: Located, digest: bytes, hashes: Sequence[bytes]) -> list[Location]:
    """Return the locations in a message of `pack_locations`: blocks of `digest`, the first of those
    that were asked for.

    Raises WireError.
    """
    places = located.places
    if not places:
        return []
    try:
        shape = BlockShape(digest, located.layers, located.layer_bytes)
        sums = np.frombuffer(b"".join(place.sums for place in places), "<u8").astype(np.uint64)
        return [
            Location(place.path, place.segment, place.slot, shape, padded(name), row)
            for place, name, row in zip(
                *(places, hashes[: len(places)], sums.reshape(len(places), shape.layers)),
                strict=True,
            )
        ]
    except ValueError as error:
        raise WireError(f"locations that make no sense: {error}") from error


def socket_path(name: str, folder: str | os.PathLike[str] | None = None) -> Path:
    """Return the path where the node of this arena listens. A name that is too long is replaced by
    its hash.

    Raises ValueError if the folder alone is too long for a socket.
    """
    parent = Path(tempfile.gettempdir() if folder is None else folder)
    path = parent / f"headrace-kv-{name}.sock"
    if len(os.fsencode(path)) > MAX_PATH_BYTES:
        short = hashlib.blake2b(name.encode(), digest_size=8).hexdigest()
        path = parent / f"headrace-kv-{short}.sock"
    if len(os.fsencode(path)) > MAX_PATH_BYTES:
        raise ValueError(f"{path} is longer than the {MAX_PATH_BYTES} bytes that a socket may have")
    return path
