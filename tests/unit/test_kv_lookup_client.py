"""What a planner is told of the tiers below DRAM; a node which is away costs it nothing."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from headrace_kvstore.lookup.availability import AvailableRun
from headrace_kvstore.lookup.lookup_client import LookupClient
from headrace_kvstore.lookup.store_view import StoreView
from headrace_kvstore.node.node import StoreNode
from headrace_kvstore.protocol import wire
from headrace_kvstore.settings.store_settings import StoreSettings
from tests.support.kvnode import DIGEST, Engine, keys, settings, settled

PATIENT_S = 60.0


# What a node says


@pytest.fixture
def node(tmp_path: Path) -> Iterator[StoreNode]:
    node = StoreNode(settings(tmp_path)).start()
    yield node
    node.close()


def on_nvme_only(node: StoreNode, engine: Engine, *numbers: int) -> None:
    engine.put(*numbers)
    assert settled(node, PATIENT_S)
    assert engine.arena.discard(engine.row, keys(*numbers)) == len(numbers)


def test_a_node_tells_the_leading_run_by_medium(node: StoreNode, engine: Engine) -> None:
    assert node.operations.find_available(DIGEST, keys(0, 1)) == []
    on_nvme_only(node, engine, 0, 1, 2)
    engine.put(2)
    assert node.operations.find_available(DIGEST, keys(0, 1, 2, 3)) == [
        AvailableRun("nvme", 2),
        AvailableRun("dram", 1),
    ]
    assert node.operations.find_available(DIGEST, keys(3, 0)) == []
    assert node.operations.find_available(b"another-digest..", keys(0)) == []
    assert node.operations.find_available(DIGEST, []) == []


def test_a_lookup_is_no_use_of_a_block(node: StoreNode, engine: Engine) -> None:
    on_nvme_only(node, engine, 0, 1)
    before = node.operations.stats()
    for _ in range(3):
        node.operations.find_available(DIGEST, keys(0, 1, 2), 1.0)
    after = node.operations.stats()
    for count in ("hits", "misses"):
        assert after["tiers"]["nvme"][count] == before["tiers"]["nvme"][count]
    assert (after["promoted"], after["remote"]["pulls_not_worth_it"]) == (0, 0)
    assert engine.has(0, 1) == [False, False]


# Asking it


def ask(client: LookupClient, *numbers: int, digest: bytes = DIGEST) -> list[AvailableRun]:
    return asyncio.run(client.available_runs(digest, keys(*numbers), 0.0))


@pytest.fixture
def client(tmp_path: Path) -> Iterator[LookupClient]:
    client = LookupClient("arena", limit_s=PATIENT_S, retry_s=PATIENT_S, socket_folder=tmp_path)
    yield client
    client.close()


def test_the_node_s_answer_comes_over_its_socket(
    node: StoreNode, engine: Engine, client: LookupClient
) -> None:
    on_nvme_only(node, engine, 0, 1)
    assert ask(client, 0, 1, 2) == [AvailableRun("nvme", 2)]
    assert ask(client, 0, digest=b"another-engine..") == []
    assert ask(client) == []


def test_any_blocks_below_dram_are_found(
    node: StoreNode, engine: Engine, client: LookupClient
) -> None:
    on_nvme_only(node, engine, 0, 2)
    engine.put(3)

    def held(digest: bytes) -> set[bytes]:
        return asyncio.run(client.find_held(digest, keys(0, 1, 2)))

    assert held(DIGEST) == set(keys(0, 2))
    assert held(b"another-engine..") == set()
    node.close()
    assert held(DIGEST) == set()


def test_many_ask_at_once_and_each_gets_its_own_answer(
    node: StoreNode, engine: Engine, client: LookupClient
) -> None:
    on_nvme_only(node, engine, *range(8))

    async def all_at_once() -> list[list[AvailableRun]]:
        wanted = (client.available_runs(DIGEST, keys(*range(n)), 0.0) for n in range(1, 9))
        return list(await asyncio.gather(*wanted))

    assert asyncio.run(all_at_once()) == [[AvailableRun("nvme", n)] for n in range(1, 9)]


def test_a_node_that_was_restarted_is_asked_again(
    node: StoreNode, engine: Engine, tmp_path: Path
) -> None:
    client = LookupClient("arena", limit_s=PATIENT_S, retry_s=0.05, socket_folder=tmp_path)
    on_nvme_only(node, engine, 0)

    async def before_and_after() -> None:
        assert await client.available_runs(DIGEST, keys(0), 0.0) == [AvailableRun("nvme", 1)]
        node.close()
        assert await client.available_runs(DIGEST, keys(0), 0.0) == []
        other = StoreNode(settings(tmp_path)).start()
        assert await asyncio.to_thread(settled, other, PATIENT_S)
        await asyncio.sleep(0.1)
        assert await client.available_runs(DIGEST, keys(0), 0.0) == [AvailableRun("nvme", 1)]
        other.close()
        client.close()

    asyncio.run(before_and_after())


def test_a_node_with_nothing_below_dram_is_not_asked_again_and_again(
    tmp_path: Path, client: LookupClient
) -> None:
    alone = StoreNode(settings(tmp_path, nvme_folder=None)).start()
    for _ in range(3):
        assert ask(client, 0) == []
    assert alone.operations.stats()["requests"]["lookup"] == 1
    alone.close()


def test_without_a_node_there_is_no_wait(client: LookupClient) -> None:
    assert ask(client, 0) == []  # or the test would take as long as the limit


class Mute:
    """Listens at a node's socket, and answers with `reply` or not at all."""

    def __init__(self, folder: Path) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.bind(f"ipc://{wire.socket_path('arena', folder)}")

    def heard(self, wait_ms: int = 0) -> list[bytes] | None:
        return self._socket.recv_multipart() if self._socket.poll(wait_ms) else None

    def answer(self, reply: wire.Reply) -> None:
        asked = self.heard(int(1e3 * PATIENT_S))
        assert asked is not None
        self._socket.send_multipart((asked[0], wire.encode(1, reply)))

    def close(self) -> None:
        self._context.destroy(0)


@pytest.fixture
def mute(tmp_path: Path) -> Iterator[Mute]:
    mute = Mute(tmp_path)
    yield mute
    mute.close()


def test_a_node_that_hangs_is_waited_for_once_and_the_loop_goes_on(
    mute: Mute, tmp_path: Path
) -> None:
    client = LookupClient("arena", limit_s=1.0, retry_s=PATIENT_S, socket_folder=tmp_path)

    async def beside() -> tuple[list[AvailableRun], int]:
        asked = asyncio.create_task(client.available_runs(DIGEST, keys(0), 0.0))
        turns = 0
        while not asked.done():
            turns += 1
            await asyncio.sleep(0)
        return asked.result(), turns

    found, turns = asyncio.run(beside())
    assert found == [] and turns > 10
    assert mute.heard(int(1e3 * PATIENT_S)) is not None
    assert ask(client, 0) == []
    assert mute.heard() is None, "it is left alone for a while"
    client.close()


@pytest.mark.parametrize("reply", [wire.Failed("the node is busy"), wire.Done(), b"nonsense"])
def test_another_answer_counts_as_none(mute: Mute, tmp_path: Path, reply: Any) -> None:
    # Nonsense answers no question, so what ends the wait is the limit.
    limit_s = 0.2 if isinstance(reply, bytes) else PATIENT_S
    client = LookupClient("arena", limit_s=limit_s, retry_s=PATIENT_S, socket_folder=tmp_path)

    async def answered() -> list[AvailableRun]:
        asking = asyncio.create_task(client.available_runs(DIGEST, keys(0), 0.0))
        if isinstance(reply, bytes):
            request = await asyncio.to_thread(mute.heard, int(1e3 * PATIENT_S))
            assert request is not None
            mute._socket.send_multipart((request[0], reply))
        else:
            await asyncio.to_thread(mute.answer, reply)
        return await asking

    assert asyncio.run(answered()) == []
    client.close()


def test_a_socket_of_another_user_is_not_asked(
    mute: Mute, client: LookupClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert ask(client, 0) == []
    assert mute.heard() is None


def test_questions_without_an_answer_are_counted_and_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    client = LookupClient("nobody", limit_s=0.01, retry_s=1e-9, socket_folder=tmp_path)
    for _ in range(3):
        assert ask(client, 0) == []
    assert client.failures == {"NodeUnavailable": 3}
    assert len([r for r in caplog.records if "a plan does without" in r.message]) == 1
    client.close()


# What the planner sees


def hashes(token_ids: Any, salt: str) -> list[bytes]:
    """Block n of a prompt is block n of the engine."""
    return keys(*range(len(token_ids) // 4))


def test_a_view_joins_dram_and_what_lies_below(
    node: StoreNode, engine: Engine, tmp_path: Path
) -> None:
    given = StoreSettings(name="arena", dram_bytes=node.settings.dram_bytes, folder=tmp_path)
    client = LookupClient("arena", limit_s=PATIENT_S, socket_folder=tmp_path)
    view = StoreView(given, lambda: DIGEST, hashes, 4, client)

    def available_runs(tokens: int) -> list[AvailableRun]:
        return asyncio.run(view.available_runs(range(tokens), "", 1.0))

    assert available_runs(17) == []
    on_nvme_only(node, engine, 0, 1, 2)
    assert available_runs(17) == [AvailableRun("nvme", 12)], "in tokens"
    assert view.held_tokens(range(17), "") == 0
    engine.put(0)
    assert available_runs(17) == [AvailableRun("dram", 4), AvailableRun("nvme", 8)]
    assert available_runs(12) == [AvailableRun("dram", 4), AvailableRun("nvme", 4)], (
        "the last token is computed"
    )
    assert available_runs(3) == []
    node.close()
    assert available_runs(17)[:1] in ([], [AvailableRun("dram", 4)]), (
        "without its node, DRAM at most"
    )
    view.close()


def test_a_store_that_asks_no_node_sees_dram_only(
    node: StoreNode, engine: Engine, tmp_path: Path
) -> None:
    on_nvme_only(node, engine, 0)
    given = StoreSettings(
        name="arena", dram_bytes=node.settings.dram_bytes, folder=tmp_path, node=False
    )
    client = LookupClient("arena", limit_s=PATIENT_S, socket_folder=tmp_path)
    view = StoreView(given, lambda: DIGEST, hashes, 4, client)
    assert asyncio.run(view.available_runs(range(9), "", 1.0)) == []
    view.close()
