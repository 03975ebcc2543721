"""What operators do with blocks: pins have a limit, are listed and undone; tiers are cleared."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from headrace_kvstore import __main__ as program
from headrace_kvstore.arena.arena import Arena
from headrace_kvstore.node.administration import MAX_LISTED, parse_hex
from headrace_kvstore.node.node import StoreNode
from headrace_kvstore.protocol import wire
from headrace_kvstore.protocol.client import call
from tests.support.kvcheck import broken
from tests.support.kvnode import DIGEST, SHAPE, Engine, key, keys, settings, settled, until


@pytest.fixture
def node(tmp_path: Path) -> Iterator[StoreNode]:
    node = StoreNode(settings(tmp_path)).start()
    yield node
    assert node.close()


def pin(engine: Engine, *numbers: int) -> list[bool]:
    return [bool(each) for each in engine.arena.pin(engine.row, keys(*numbers))]


def written(node: StoreNode, engine: Engine, *numbers: int) -> None:
    engine.put(*numbers)
    until(lambda: len(node.operations.locate(DIGEST, keys(*numbers), 0.0)) == len(numbers))
    assert settled(node, 20)


def test_pins_take_half_of_the_arena_and_saves_find_room(node: StoreNode, engine: Engine) -> None:
    count = 48
    for number in range(count):
        engine.put(number)
    assert settled(node, 20), "a block that is not written yet cannot be evicted"
    there = [number for number in range(count) if engine.has(number)[0]]
    pinned = pin(engine, *there)
    share = sum(pinned) / len(there)
    assert 0.4 < share <= 0.6
    assert pinned == sorted(pinned, reverse=True), "the first blocks go before the last"
    assert pin(engine, *there) == pinned, "those that are pinned stay so"
    for number in range(100, 100 + 3 * count):
        until(lambda number=number: engine.put(number) == [True])  # type: ignore[misc]
    assert all(engine.has(*[n for n, kept in zip(there, pinned, strict=True) if kept]))
    assert broken(engine.arena) == []


def test_room_of_a_pin_that_was_undone_is_free_for_another(engine: Engine) -> None:
    engine.put(*range(40))
    there = [number for number in range(40) if engine.has(number)[0]]
    pinned = pin(engine, *there)
    last = pinned.index(False)
    engine.arena.pin(engine.row, keys(there[0]), pinned=False)
    assert pin(engine, there[last], there[-1]) == [True, False]


def test_pins_that_an_engine_of_other_weights_left_give_way(
    node: StoreNode, engine: Engine
) -> None:
    old = engine.arena
    engine.put(*range(40))
    there = [number for number in range(40) if engine.has(number)[0]]
    pinned = sum(pin(engine, *there))
    assert settled(node, 20), "a block that is not written yet cannot be evicted"
    new = Arena.attach("arena", node.settings.folder)
    row = new.register_namespace(b"other-weights--!", SHAPE.payload_bytes, SHAPE.layers)
    slots = new.reserve(row, keys(*range(100, 104)), [0] * 4, [0] * 4)
    assert (slots >= 0).all()
    new.publish(slots, np.zeros((4, SHAPE.layers), np.uint64))
    assert not new.pin(row, keys(*range(100, 104))).any(), "the first engine lives"
    assert old.stats()["pinned"] == pinned
    engine.close()
    assert new.pin(row, keys(*range(100, 104))).all()
    assert new.stats()["pinned"] == 4
    new.close()


def test_pins_are_listed_as_the_chains_that_they_are(node: StoreNode, engine: Engine) -> None:
    engine.put(0, 1, 2)
    engine.put(10)
    pin(engine, 0, 1, 2)
    pin(engine, 10)
    told = json.loads(json.dumps(node.operations.administer("pins")))
    assert [(pin["hash"], pin["blocks"]) for pin in told["pins"]] == [
        (key(10).hex(), 11),
        (key(2).hex(), 3),
    ]
    assert (told["chains"], told["blocks"]) == (2, 4)
    assert 0 < told["bytes"] <= told["limit_bytes"]
    assert {pin["namespace"] for pin in told["pins"]} == {DIGEST.hex()}
    assert node.operations.administer("pins", b"x" * 16)["chains"] == 0


def test_a_listing_is_bounded_and_its_totals_are_not(
    node: StoreNode, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace_kvstore.node.administration.MAX_LISTED", 3)
    for number in range(0, 20, 2):
        engine.put(number)
        pin(engine, number)
    told = node.operations.administer("pins")
    assert len(told["pins"]) == 3 < told["chains"] == 10 and MAX_LISTED == 1000


def fork(engine: Engine) -> None:
    """Chains 0-1-2 and 0-1-20, all pinned."""
    engine.put(0, 1, 2)
    parent = int.from_bytes(key(1)[:8], "little")
    slots = engine.arena.reserve(engine.row, keys(20), [parent], [2])
    engine.arena.publish(slots, np.zeros((1, 4), np.uint64))
    pin(engine, 0, 1, 2, 20)


def test_a_chain_is_unpinned_without_what_another_chain_needs(
    node: StoreNode, engine: Engine
) -> None:
    fork(engine)
    assert node.operations.administer("unpin", None, key(2)) == {"unpinned": 1}
    told = node.operations.administer("pins")
    assert [pin["hash"] for pin in told["pins"]] == [key(20).hex()] and told["blocks"] == 3
    assert node.operations.administer("unpin", DIGEST, key(20)) == {"unpinned": 3}
    assert node.operations.administer("unpin", None, key(20)) == {"unpinned": 0}


def test_all_pins_or_those_of_a_namespace_are_undone(node: StoreNode, engine: Engine) -> None:
    fork(engine)
    assert node.operations.administer("unpin", b"x" * 16) == {"unpinned": 0}
    assert node.operations.administer("unpin") == {"unpinned": 4}
    assert engine.arena.stats()["pinned"] == 0


def test_clearing_removes_blocks_from_dram_and_disk_and_no_others(
    node: StoreNode, engine: Engine
) -> None:
    written(node, engine, 0, 1, 2)
    pin(engine, 0)
    assert node.operations.administer("clear", b"x" * 16) == {"dram": 0, "nvme": 0}
    node.operations.locate(DIGEST, keys(1), 60.0)  # a reader has a lease
    assert node.operations.administer("clear", DIGEST) == {"dram": 3, "nvme": 3}
    assert engine.has(0, 1, 2) == [False] * 3
    assert node.operations.locate(DIGEST, keys(0), 0.0) == []
    assert settled(node, 20)
    written(node, engine, 0, 5)
    assert node.operations.administer("clear") == {"dram": 2, "nvme": 2}


def test_what_was_cleared_stays_away_after_a_restart(tmp_path: Path) -> None:
    node = StoreNode(settings(tmp_path)).start()
    engine = Engine(node.settings)
    written(node, engine, 0, 1, 2)
    node.operations.locate(DIGEST, keys(1), 60.0)
    node.operations.administer("clear")
    engine.close()
    assert node.close()
    node = StoreNode(settings(tmp_path)).start()
    until(lambda: node.tiers.nvme is not None)
    assert node.operations.stats()["tiers"]["nvme"]["blocks"] == 0
    assert node.close()


def test_a_block_is_found_where_it_is(node: StoreNode, engine: Engine) -> None:
    written(node, engine, 0)
    told = node.operations.administer("lookup", None, key(0))
    assert told == {"tiers": {DIGEST.hex(): ["dram", "nvme"]}}
    engine.arena.clear()
    told = node.operations.administer("lookup", DIGEST, key(0))
    assert told == {"tiers": {DIGEST.hex(): ["nvme"]}}
    assert node.operations.administer("lookup", None, key(9)) == {"tiers": {}}
    assert node.operations.administer("lookup", b"x" * 16, key(0)) == {"tiers": {}}


def test_the_socket_answers_operators_and_says_what_is_wrong(
    node: StoreNode, engine: Engine, tmp_path: Path
) -> None:
    engine.put(0)
    pin(engine, 0)

    def ask(request: wire.Request) -> wire.Reply:
        return call("arena", request, 20.0, tmp_path)

    reply = ask(wire.Administer("pins"))
    assert isinstance(reply, wire.Stats) and reply.values["blocks"] == 1
    for wrong in (wire.Administer("lookup"), wire.Administer("clear", None, key(0))):
        assert isinstance(ask(wrong), wire.Failed)
    assert isinstance(ask(wire.Administer("format")), wire.Failed)


def test_the_program_carries_out_an_operators_commands(
    node: StoreNode, engine: Engine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.put(0)
    pin(engine, 0)
    there = ["--set", "name=arena", "--set", f"socket_folder={tmp_path}"]
    assert program.main(["pins", *there]) == 0
    assert json.loads(capsys.readouterr().out)["chains"] == 1
    assert program.main(["unpin", *there, "--hash", key(0).hex()]) == 0
    assert json.loads(capsys.readouterr().out) == {"unpinned": 1}
    assert program.main(["lookup", *there]) == 1
    assert "needs the hash" in capsys.readouterr().err
    assert program.main(["lookup", *there, "--hash", "zz"]) == 2
    assert program.main(["clear", *there, "--namespace", "00"]) == 2
    assert "16 bytes in hex" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "0", "zz", "00" * 17, "00" * 15])
def test_a_digest_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="16 bytes in hex"):
        parse_hex(text, 16)
