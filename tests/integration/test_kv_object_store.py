"""The object tier over a real S3 API: other clusters, warm starts, and lines that fail."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace_engine.connector.identity.weights import Unidentified, objects_fingerprint
from headrace_kvstore.node.node import StoreNode
from headrace_kvstore.objects.object_client import ObjectError, StoreClient
from headrace_kvstore.objects.object_format import object_bytes
from headrace_kvstore.objects.object_tier import ObjectTier
from tests.support.kvnode import DIGEST, SHAPE, Engine, key, keys, settings, until
from tests.support.kvobjects import BUCKET, Blocks, Line, has, s3_options, tiers

Begin = Callable[..., ObjectTier]
TIMEOUT_S = 1.0
EACH = object_bytes(SHAPE)


@pytest.fixture
def url(request: pytest.FixtureRequest) -> str:
    """A prefix of this test's own."""
    return f"s3://{BUCKET}/kv/{request.node.name.replace('[', '-').replace(']', '')}"


@pytest.fixture
def direct(s3_port: int, url: str) -> StoreClient:
    """The store as it is, whatever the line does."""
    return StoreClient(url, s3_options(s3_port), 10.0)


@pytest.fixture
def begin(line: Line, url: str) -> Iterator[Begin]:
    """Tiers over the line."""
    with tiers(StoreClient(url, s3_options(line.port), TIMEOUT_S)) as made:
        yield lambda writer="w", **more: made(writer, timeout_s=TIMEOUT_S, **more)


@pytest.fixture
def blocks() -> Blocks:
    return Blocks()


def test_blocks_go_through_s3_and_come_back(begin: Begin, blocks: Blocks) -> None:
    writer = begin("a")
    assert blocks.write(writer, 0, 1, 2)
    reader = begin("b")
    assert blocks.load(reader, 2, 0, 1) == [True] * 3
    assert blocks.write(writer, 3)
    until(lambda: has(reader, 3) == [True])
    assert blocks.load(reader, 3) == [True]


def test_two_writers_of_one_key_do_no_harm(
    begin: Begin, blocks: Blocks, direct: StoreClient
) -> None:
    first, second = begin("a", refresh_s=60.0), begin("b", refresh_s=60.0)
    assert blocks.write(first, 0) and blocks.write(second, 0)
    assert len(list(direct.list())) == 2
    assert blocks.load(first, 0) == blocks.load(second, 0) == [True]
    assert blocks.load(begin("c"), 0) == [True]
    direct.delete([next(direct.list()).name])
    assert blocks.load(begin("d"), 0) == [True]


def test_room_is_made_by_removing_own_objects(
    begin: Begin, blocks: Blocks, direct: StoreClient
) -> None:
    tier = begin(size_bytes=2 * EACH)
    for number in range(4):
        assert blocks.write(tier, number)
    assert has(tier, 0, 1, 2, 3) == [False, False, True, True]
    assert sum(listed.size_bytes for listed in direct.list()) == 2 * EACH


def damage(direct: StoreClient, change: Callable[[bytearray], bytes | bytearray]) -> None:
    """Replace the object of block 1 by one with other bytes."""
    (listed,) = (each for each in direct.list() if key(1).hex() in each.name)
    whole = bytearray(direct.get(listed.name, 0, listed.size_bytes))
    direct.put(listed.name, memoryview(bytes(change(whole))))


def test_a_flipped_byte_in_an_object_is_a_miss(
    begin: Begin, blocks: Blocks, direct: StoreClient
) -> None:
    tier = begin(refresh_s=60.0)
    blocks.write(tier, 0, 1)

    def flip(data: bytearray) -> bytearray:
        data[SHAPE.layer_bytes + 5] ^= 0x80
        return data

    damage(direct, flip)
    assert blocks.load(tier, 0, 1) == [True, False]
    assert tier.stats()["reads_corrupt"] == 1
    assert blocks.load(begin("late"), 0, 1) == [True, False]


def test_a_truncated_object_is_a_miss_and_never_found_again(
    begin: Begin, blocks: Blocks, direct: StoreClient
) -> None:
    tier = begin(refresh_s=60.0)
    blocks.write(tier, 0, 1)
    damage(direct, lambda data: data[:100])
    assert blocks.load(tier, 1) == [False]
    assert tier.stats()["reads_truncated"] == 1
    assert has(tier, 0, 1) == [True, False]
    late = begin("late")
    assert has(late, 0, 1) == [True, False]
    assert late.stats()["ignored"] == {"truncated": 1}


def test_an_upload_that_is_cut_leaves_nothing(
    begin: Begin, blocks: Blocks, line: Line, direct: StoreClient
) -> None:
    tier = begin(refresh_s=60.0)
    line.set("dead")
    assert not blocks.write(tier, 0)
    stats = tier.stats()
    assert stats.get("writes_unreachable", 0) + stats.get("writes_failed", 0) == 1
    assert list(direct.list()) == []
    line.set("whole")
    until(lambda: blocks.write(tier, 0))
    assert blocks.load(tier, 0) == [True]


@pytest.mark.parametrize(
    ("mode", "reasons"),
    [
        ("dead", {"reads_unreachable", "reads_failed"}),
        ("held", {"reads_timeout"}),
        ("slow", {"reads_timeout"}),
    ],
)
def test_an_endpoint_that_fails_in_the_middle_costs_hits_until_it_works_again(
    begin: Begin, blocks: Blocks, line: Line, mode: str, reasons: set[str]
) -> None:
    tier = begin(refresh_s=60.0)
    numbers = range(6)
    for number in numbers:
        assert blocks.write(tier, number)
    line.set(mode)
    began_s = time.monotonic()
    assert blocks.load(tier, *numbers) == [False] * 6
    until(lambda: blocks.load(tier, *numbers) == [False] * 6 and not tier.may_read)
    assert reasons & {name for name, count in tier.stats().items() if count}
    assert has(tier, *numbers) == [True] * 6
    line.set("whole")
    until(lambda: blocks.load(tier, *numbers) == [True] * 6)
    assert time.monotonic() > began_s


def test_a_line_cut_within_an_answer_is_a_miss(begin: Begin, line: Line) -> None:
    blocks = Blocks(room=40)
    tier = begin(refresh_s=60.0)
    assert blocks.write(tier, *range(40))
    line.cut_after_bytes = line.passed_bytes + 10 * SHAPE.payload_bytes
    got = blocks.load(tier, *range(40))
    assert not all(got)
    line.cut_after_bytes = None
    line.set("whole")
    until(lambda: all(blocks.load(tier, *range(40))))


def test_a_bucket_that_is_not_there_is_named(line: Line) -> None:
    client = StoreClient("s3://nobody/p", s3_options(line.port), TIMEOUT_S)
    with pytest.raises(ObjectError) as raised:
        list(client.list())
    assert raised.value.reason == "absent"


# Nodes


@pytest.fixture
def start(tmp_path: Path, line: Line, url: str) -> Iterator[Callable[..., StoreNode]]:
    nodes: list[StoreNode] = []

    def make(place: str, **values: Any) -> StoreNode:
        folder = tmp_path / place
        folder.mkdir()
        usual: dict[str, Any] = {
            "object_url": url,
            "object_options": s3_options(line.port),
            "object_writer": place,
            "object_sweep_s": 0.05,
            "object_refresh_s": 0.2,
            "object_timeout_s": TIMEOUT_S,
        }
        nodes.append(StoreNode(settings(folder, **(usual | values))).start())
        return nodes[-1]

    yield make
    for node in nodes:
        node.close()


def held(node: StoreNode) -> int:
    """Blocks that the node knows in objects."""
    return int(node.operations.stats()["tiers"]["object"]["blocks"])


def test_a_new_node_with_nothing_starts_warm_from_what_another_left(
    start: Callable[..., StoreNode], direct: StoreClient
) -> None:
    first = start("a")
    engine = Engine(first.settings)
    engine.put(*range(6))
    engine.arena.lease(engine.row, keys(*range(6)), 0.1)
    until(lambda: held(first) == 6)
    engine.close()
    first.close()
    assert len(list(direct.list())) == 6
    later = start("b", warm=True)
    other = Engine(later.settings)
    until(lambda: other.has(*range(6)) == [True] * 6)
    other.close()


def test_two_nodes_that_store_the_same_blocks_both_keep_serving_them(
    start: Callable[..., StoreNode],
) -> None:
    nodes = [start("a"), start("b")]
    engines = [Engine(node.settings) for node in nodes]
    for engine in engines:
        engine.put(0, 1, 2)
        engine.arena.lease(engine.row, keys(0, 1, 2), 0.1)
    until(lambda: [held(node) for node in nodes] == [3, 3])
    for node, engine in zip(nodes, engines, strict=True):
        engine.arena.clear(engine.row)
        assert node.tiers.nvme is not None
        for name in keys(0, 1, 2):
            node.tiers.nvme.discard(DIGEST, name)
        pulling = node.operations.pull(DIGEST, keys(0, 1, 2))
        assert pulling is not None and pulling.done.result(20) == 3
        assert engine.has(0, 1, 2) == [True] * 3
        engine.close()


def test_a_pull_from_an_endpoint_that_dies_ends_and_the_engine_stores_on(
    start: Callable[..., StoreNode], line: Line
) -> None:
    node = start("a", nvme_folder=None)
    engine = Engine(node.settings)
    engine.put(0, 1, 2)
    engine.arena.lease(engine.row, keys(0, 1, 2), 0.1)
    until(lambda: held(node) == 3)
    engine.arena.clear(engine.row)
    line.set("held")
    pulling = node.operations.pull(DIGEST, keys(0, 1, 2))
    assert pulling is not None and pulling.done.result(20) == 0
    assert engine.put(0, 7) == [True, True]
    assert engine.has(0, 7) == [True, True]
    line.set("whole")
    until(lambda: node.operations.pull(DIGEST, [key(1)]) is not None)
    until(lambda: engine.has(1) == [True])
    engine.close()


def test_weights_in_a_bucket_are_known_by_their_versions(s3_port: int, url: str) -> None:
    bucket, options = StoreClient(url, s3_options(s3_port), 10.0), s3_options(s3_port)
    bucket.put("model-1.safetensors", memoryview(b"weights"))
    bucket.put("config.json", memoryview(b"{}"))
    before = objects_fingerprint(url, options)
    assert objects_fingerprint(url, options) == before
    bucket.put("model-1.safetensors", memoryview(b"others!"))
    assert objects_fingerprint(url, options) != before
    with pytest.raises(Unidentified, match="0 objects"):
        objects_fingerprint(f"{url}-none", options)
