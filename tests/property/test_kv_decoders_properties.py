"""Everything that decodes bytes of another process: what comes is a message with sense, or it is
refused by the error that the caller expects. Nothing else is raised, nothing grows."""

from __future__ import annotations

import contextlib
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_kvstore.nvme.record import BlockShape, unpack_header, unpack_segment
from headrace_kvstore.peers import messages
from headrace_kvstore.peers.block_directory import MEDIA, BlockDirectory
from headrace_kvstore.peers.block_tags import BlockTags
from headrace_kvstore.peers.messages import Leased, LeasedBlock
from headrace_kvstore.peers.peer_source import PeerLease, PullLimits
from headrace_kvstore.peers.pull_cost import PeerRun
from headrace_kvstore.protocol import wire
from headrace_kvstore.protocol.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
)
from headrace_kvstore.protocol.gossip_log import EntryPage, GossipEntry
from tests.support.kvnode import DIGEST, SECRET, SHAPE, keys

NOTES = EntryPage("g", 1, 2, [GossipEntry(b"w", b"s", 1, b"data")])
FRAMES = [
    wire.encode(3, body)
    for body in (
        messages.HandshakeRequest(),
        messages.PollRequest("g", 1, 2, 3),
        messages.Lease("g", DIGEST, 4, 64, keys(0, 1), 3.0),
        messages.Release(1, [0, 1]),
        messages.GetTags(1),
        messages.Tags(b"tags"),
        messages.HandshakeResponse("g", b"metadata"),
        messages.PollResponse("g", NOTES, 3, [b"batch"], 4),
        Leased(1, [LeasedBlock(0, 2**47, 1, 2, 3, 0.5)], bytes(32)),
        wire.Locate("r", DIGEST, keys(0), 1.0, 0.5),
        wire.AppendEntry("g", NOTES.entries[0]),
        wire.Located(4, 64, [wire.Place("/a", 1, 0, bytes(32))]),
        wire.LookupReply([("dram", 1, 0.0)]),
    )
]
DECODERS = {
    "peer's request": messages.decode_request,
    "peer's reply": messages.decode_reply,
    "request": wire.decode_request,
    "reply": wire.decode_reply,
}
plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.binary()
    | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=20,
)
values = plain.map(msgspec.msgpack.encode)


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """A message of which some bytes were changed, cut or put in."""
    frame = bytearray(draw(st.sampled_from(FRAMES)))
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, len(frame)))
        frame[at : at + draw(st.integers(0, 3))] = draw(st.binary(max_size=3))
    return bytes(frame)


@pytest.mark.parametrize("name", DECODERS)
@settings(max_examples=300)
@given(frame=st.binary(max_size=100) | values | damaged())
def test_a_frame_is_a_message_or_refused(name: str, frame: bytes) -> None:
    with contextlib.suppress(wire.WireError):
        id, body = DECODERS[name](frame)
        assert isinstance(id, int)
        assert DECODERS[name](wire.encode(id, body)) == (id, body)


hashes = st.lists(st.binary(max_size=40) | st.integers(0, 2**64 - 1), max_size=8)
owners = (
    st.none() | st.text(max_size=8) | st.just(DIGEST.hex()) | st.binary(max_size=20).map(bytes.hex)
)
media = st.none() | st.sampled_from([*MEDIA, "OBJECT", "GPU"])
events = st.one_of(
    st.builds(AllBlocksCleared),
    st.builds(
        lambda names, medium, owner: BlockStored(
            names, None, [], 0, None, medium, None, ownership=owner
        ),
        *(hashes, media, owners),
    ),
    st.builds(
        lambda names, medium, owner: BlockRemoved(names, medium, ownership=owner),
        *(hashes, media, owners),
    ),
)


@settings(max_examples=300)
@given(st.lists(st.tuples(st.integers(0, 5), st.lists(events, max_size=5)), max_size=12))
def test_a_directory_takes_any_events_and_stays_within_its_bound(
    told: list[tuple[int, list[Any]]],
) -> None:
    directory = BlockDirectory(most_blocks=10)
    for seq, batch in told:
        sent = msgspec.msgpack.encode(EventBatch(0.0, batch))
        with contextlib.suppress(ValueError, RecursionError):
            directory.apply("n", seq, msgspec.msgpack.decode(sent, type=EventBatch).events)
        assert sum(directory.blocks("n", medium) for medium in MEDIA) <= 10
    assert directory.blocks("n", "OBJECT") == directory.blocks("n", "GPU") == 0
    assert len(directory.leading("n", DIGEST, keys(0, 1), MEDIA)) <= 2


words = st.integers(0, 2**64 - 1)
rows = st.lists(
    st.builds(
        LeasedBlock,
        *(st.integers(0, 8) | st.integers(0, 2**32 - 1), words, words),
        *(st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1)),
        st.floats(0, 1e9),
    ),
    max_size=5,
)


class Source:
    limits = PullLimits(1.0, 2.0)


@settings(max_examples=300)
@given(rows, st.binary(max_size=200) | st.integers(0, 5).map(lambda n: bytes(8 * SHAPE.layers * n)))
def test_a_lease_names_blocks_that_were_asked_for_or_is_refused(
    leased: list[LeasedBlock], sums: bytes
) -> None:
    asked = keys(*range(4))
    source: Any = Source()
    try:
        offer = PeerLease(
            *(source, PeerRun("p", ()), "n", SHAPE, asked, Leased(1, leased, sums)),
            *(BlockTags(SECRET, "g"), 0.0),
        )
    except (ValueError, IndexError, OverflowError):
        return
    assert all(found.hash in asked and len(found.sums) == SHAPE.layers for found in offer.found)


places = st.builds(
    wire.Place,
    *(st.text(max_size=5), st.integers(0, 9), st.integers(0, 9)),
    st.binary(max_size=40) | st.integers(0, 5).map(lambda layers: bytes(8 * layers)),
)


@settings(max_examples=300)
@given(
    st.integers(-1, 2**63 - 1) | st.integers(1, 5),
    st.integers(-1, 2**63 - 1),
    st.lists(places, max_size=3),
)
def test_locations_have_sense_or_are_refused(
    layers: int, layer_bytes: int, places: list[wire.Place]
) -> None:
    located = wire.Located(layers, layer_bytes, places)
    with contextlib.suppress(wire.WireError):
        found = wire.unpack_locations(located, DIGEST, keys(0, 1))
        assert len(found) == len(places) and all(len(f.sums) == layers for f in found)


@settings(max_examples=300)
@given(st.binary(max_size=5000), st.integers(1, 600), st.integers(1, 2**40))
def test_any_bytes_of_a_file_are_a_header_or_none(
    data: bytes, layers: int, layer_bytes: int
) -> None:
    assert unpack_header(BlockShape(DIGEST, layers, layer_bytes), data) is None
    assert unpack_segment(data) is None or np.frombuffer(data, np.uint8).any()
