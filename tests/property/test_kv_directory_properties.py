"""The directory of peers' blocks against a naive model: what a subscriber with losses ends with."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_kvstore.peers.block_directory import BlockDirectory, Event
from headrace_kvstore.protocol.events import (
    DRAM,
    NVME,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
)

DIGESTS = (b"namespace-digest", b"another-digest-!")
MEDIA = (DRAM, NVME)
Block = tuple[int, str, int]
"""Digest's number, medium, block's number."""

blocks = st.tuples(st.integers(0, 1), st.sampled_from(MEDIA), st.integers(0, 5))
changes = st.tuples(st.booleans(), blocks)


def name(number: int) -> bytes:
    return bytes([number + 1]) * (32 if number % 2 else 16)


def event(stored: bool, block: Block) -> Event:
    digest, medium, number = block
    where = {"locality": "LOCAL", "ownership": DIGESTS[digest].hex()}
    if stored:
        return BlockStored([name(number)], None, [], 0, None, medium, None, **where)
    return BlockRemoved([name(number)], medium, **where)


class Publisher:
    """A node: what it holds, and all batches since it started, numbered."""

    def __init__(self) -> None:
        self.held: set[Block] = set()
        self.batches: list[Sequence[Event]] = []
        self.resync()

    def resync(self) -> None:
        state = [AllBlocksCleared(), *(event(True, block) for block in sorted(self.held))]
        self.batches.append(state)

    def change(self, made: Sequence[tuple[bool, Block]]) -> None:
        for stored, block in made:
            (self.held.add if stored else self.held.discard)(block)
        self.batches.append([event(*each) for each in made])


steps = st.lists(
    st.one_of(
        st.tuples(st.just("change"), st.lists(changes, min_size=1, max_size=4)),
        st.tuples(st.just("resync"), st.none()),
        st.tuples(st.just("restart"), st.none()),
        st.tuples(st.just("lose"), st.none()),
        st.tuples(st.just("forget"), st.none()),
        st.tuples(st.just("drop"), st.none()),
    ),
    max_size=30,
)


def sync(directory: BlockDirectory, node: Publisher, first: int, keep: int) -> None:
    """Deliver batches from `first` on; on a gap, replay: the batches if they are kept, else the
    whole state under the latest number."""
    for seq in range(first, len(node.batches)):
        if directory.apply("n", seq, node.batches[seq]):
            continue
        wanted = directory.wanted("n")
        if wanted < keep:
            state = [AllBlocksCleared(), *(event(True, block) for block in sorted(node.held))]
            assert directory.apply("n", len(node.batches) - 1, state)
            return
        for again in range(wanted, len(node.batches)):
            assert directory.apply("n", again, node.batches[again])
        return


@settings(max_examples=300)
@given(steps)
def test_whatever_was_lost_replayed_or_restarted_it_ends_with_what_the_node_holds(
    script: list[tuple[str, list[tuple[bool, Block]] | None]],
) -> None:
    directory, node = BlockDirectory(), Publisher()
    sent = keep = 0
    for step, made in script:
        if step == "change" and made is not None:
            node.change(made)
            sync(directory, node, sent, keep)
        elif step == "resync":
            node.resync()
            sync(directory, node, sent, keep)
        elif step == "restart":
            node = Publisher()
            keep = 0
            directory.drop("n")
        elif step == "lose":
            node.change([(True, (0, DRAM, 0))])
        elif step == "forget":
            keep = len(node.batches)
        else:
            directory.drop("n")
        sent = len(node.batches)
    node.change([(True, (1, NVME, 5))])
    sync(directory, node, len(node.batches) - 1, keep)

    for medium in MEDIA:
        assert directory.blocks("n", medium) == sum(1 for b in node.held if b[1] == medium)
    for number, digest in enumerate(DIGESTS):
        for block in range(6):
            media = [m for m in MEDIA if (number, m, block) in node.held]
            assert directory.leading("n", digest, [name(block)], MEDIA) == media[:1]
