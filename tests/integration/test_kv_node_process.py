"""A store node in a process of its own: killed, restarted, ended."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace_kvstore.nvme.file_io import FileIo
from headrace_kvstore.protocol import wire
from headrace_kvstore.protocol.client import NodeClient
from tests.support.kvcheck import broken
from tests.support.kvnode import DIGEST, Engine, Reader, answers, keys, locate, until
from tests.support.kvprocess import ROOT, Node


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "node").mkdir()
    return tmp_path / "node"


@pytest.fixture
def begin(folder: Path) -> Iterator[Callable[..., Node]]:
    nodes: list[Node] = []

    def start(**values: Any) -> Node:
        nodes.append(Node(folder, **values))
        return nodes[-1].ready()

    yield start
    for node in nodes:
        node.close()


@pytest.fixture
def client(folder: Path) -> Iterator[NodeClient]:
    client = NodeClient("arena", timeout_s=2.0, retry_s=0.05, socket_folder=folder)
    yield client
    client.close()


def test_a_killed_node_costs_hits_and_the_next_one_finds_everything(
    begin: Callable[..., Node], client: NodeClient
) -> None:
    node = begin(keep_arena=True)
    file_io = FileIo()
    engine, reader = Engine(node.settings), Reader(file_io)
    until(lambda: answers(client))
    engine.put(*range(12))
    until(lambda: len(locate(client, *range(12))) == 12)

    node.kill()
    assert locate(client, 0) == []
    assert not client.send(wire.ReportBad(DIGEST, [wire.BadBlock(keys(0)[0], "/nowhere", 0)]))
    engine.put(20)
    assert engine.has(0, 20) == [True, True]

    node = begin(keep_arena=True)
    until(lambda: answers(client))
    until(lambda: len(locate(client, *range(12), 20)) == 13)
    places = locate(client, *range(12))
    assert reader.read(places, range(12)) == [True] * 12
    assert engine.has(*range(12), 20) == [True] * 13
    nvme = node.stats()["tiers"]["nvme"]
    assert nvme["scan"]["blocks"] == 12 and nvme["writes"] == 1

    engine.arena.clear()
    promote(node, 3)
    until(lambda: engine.has(3) == [True])
    assert node.end() == 0
    assert set(os.listdir(node.folder)) == {"nvme", "arena"}
    reader.close()
    file_io.close()
    engine.close()


def test_a_node_killed_while_it_reads_and_writes_leaves_nothing_wrong(
    begin: Callable[..., Node],
) -> None:
    node = begin(keep_arena=True)
    engine = Engine(node.settings)
    for first in range(0, 60, 20):
        engine.put(*range(first, first + 20))
        promote(node, *range(first))
    node.kill()
    assert broken(engine.arena) == []
    engine.has(*range(60))  # and compares bytes and checksums
    node = begin(keep_arena=True)
    there = [number for number in range(60) if engine.has(number)[0]]
    for number in there:
        until(lambda number=number: len(_located(node, number)) == 1)  # type: ignore[misc]
    engine.arena.clear()
    promote(node, *there[:20])
    until(lambda: all(engine.has(*there[:20])))
    engine.close()


def promote(node: Node, *numbers: int) -> None:
    """Have the node bring blocks into DRAM: a second request asks for them."""
    for request in ("first", "second"):
        for number in numbers:
            node.call(wire.Locate(request, DIGEST, keys(number), 1.0))


def _located(node: Node, number: int) -> list[wire.Place]:
    places: list[wire.Place] = node.call(wire.Locate("r", DIGEST, keys(number), 1.0)).places
    return places


def test_engines_and_the_next_node_share_one_arena_after_a_clean_restart(
    begin: Callable[..., Node], client: NodeClient, folder: Path
) -> None:
    node = begin()
    engine = Engine(node.settings)
    engine.put(0)
    inode = (folder / "arena").stat().st_ino
    assert node.end() == 0
    assert (folder / "arena").stat().st_ino == inode
    node = begin()
    engine.put(1)
    until(lambda: len(locate(client, 0, 1)) == 2)
    assert node.end() == 0
    engine.close()
    node = begin()
    assert node.end() == 0 and not (folder / "arena").exists(), "the last one to go removes it"


def test_a_second_node_is_refused_and_sigterm_leaves_nothing_but_files(
    begin: Callable[..., Node], folder: Path
) -> None:
    first = begin()
    second = Node(folder)
    assert second.process.wait(30) == 1 and "another store node" in second.said()
    assert isinstance(first.call(wire.GetStats()), wire.Stats)
    assert {"arena", "headrace-kv-arena.sock", "nvme"} < set(os.listdir(folder))
    assert first.end() == 0
    assert set(os.listdir(folder)) == {"nvme"}


def test_wrong_settings_are_named(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "headrace_kvstore", "node", "--set", "nvme_bytes=much"],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(ROOT / "kvstore")},
        check=False,
    )
    assert done.returncode == 2
    assert "nvme_bytes: is 'much'" in done.stderr
