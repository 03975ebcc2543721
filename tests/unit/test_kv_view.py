"""What the planner sees of the arena: exactly what its engine could load, and never an error."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils
from vllm.v1.request import Request

from headrace_engine.vllm.kv_cache import BlockHasher
from headrace_kvstore.arena.arena import Arena
from headrace_kvstore.arena.locking import FileLock
from headrace_kvstore.lookup.availability import DRAM, AvailableRun
from headrace_kvstore.lookup.state_hits import StateHits
from headrace_kvstore.lookup.store_view import StoreView
from headrace_kvstore.settings.store_settings import StoreSettings

BLOCK, BLOCK_BYTES, LAYERS = 4, 4096, 2
DIGEST = b"a" * 16


def hashes(token_ids: Sequence[int], salt: str) -> list[bytes]:
    chain, found = salt.encode(), []
    for end in range(BLOCK, len(token_ids) + 1, BLOCK):
        chain = bytes([*chain[:8], *token_ids[end - BLOCK : end]]).ljust(32, b".")[:32]
        found.append(chain)
    return found


@pytest.fixture
def settings(tmp_path: Path) -> StoreSettings:
    return StoreSettings(name="arena", dram_bytes=2**20, folder=tmp_path)


@pytest.fixture
def arena(settings: StoreSettings) -> Iterator[Arena]:
    """As the engine made it."""
    with Arena.create_or_attach(
        "arena", 2**20, folder=settings.folder, block_bytes=BLOCK_BYTES, layers=LAYERS
    ) as arena:
        arena.register_namespace(DIGEST, BLOCK_BYTES, LAYERS)
        yield arena


def put(arena: Arena, row: int, names: Sequence[bytes]) -> None:
    slots = arena.reserve(row, names, [0] * len(names), range(len(names)))
    arena.publish(slots, np.zeros((len(names), LAYERS), np.uint64))


def test_the_leading_blocks_that_are_stored_are_held(arena: Arena, settings: StoreSettings) -> None:
    view = StoreView(settings, lambda: DIGEST, hashes, BLOCK)
    prompt = list(range(18))
    assert view.held_tokens(prompt, "") == 0
    put(arena, 0, hashes(prompt, "")[:2])
    assert view.held_tokens(prompt, "") == 2 * BLOCK
    assert view.held_tokens(prompt, "tenant") == 0
    assert view.held_tokens(prompt[:3], "") == 0, "less than a block"
    arena.discard(0, hashes(prompt, "")[:1])
    assert view.held_tokens(prompt, "") == 0, "a prefix begins at its beginning"
    view.close()


def test_any_blocks_that_are_stored_are_held(arena: Arena, settings: StoreSettings) -> None:
    view = StoreView(settings, lambda: DIGEST, hashes, BLOCK)
    names = hashes(list(range(18)), "")
    put(arena, 0, names[1:3])
    assert view.holds(names) == [False, True, True, False]
    assert view.holds([]) == []
    view.close()


def test_a_view_without_an_engine_holds_nothing(settings: StoreSettings) -> None:
    view = StoreView(settings, lambda: b"", hashes, BLOCK)
    assert view.holds([b"x" * 32, b"y" * 32]) == [False, False]
    view.close()


STATES = StateHits((1, 3))
"""An engine with two cache groups of recurrent layers."""


def with_states(settings: StoreSettings) -> StoreView:
    return StoreView(settings, lambda: DIGEST, hashes, BLOCK, states=lambda: STATES.recurrent)


def test_with_recurrent_layers_a_prefix_is_held_with_all_states_after_it(
    arena: Arena, settings: StoreSettings
) -> None:
    view, prompt = with_states(settings), list(range(18))
    names = hashes(prompt, "")
    put(arena, 0, [*names, *STATES.names(names[1]), STATES.name(names[2], 1)])
    assert view.held_tokens(prompt, "") == 2 * BLOCK, "the other group's state is missing"
    put(arena, 0, [STATES.name(names[2], 3)])
    assert view.held_tokens(prompt, "") == 3 * BLOCK
    whole = prompt[: 3 * BLOCK]
    assert view.held_tokens(whole, "") == 3 * BLOCK
    found = asyncio.run(view.available_runs(whole, "", 0.01))
    assert found == [AvailableRun(DRAM, 2 * BLOCK)], "the last token is computed"
    arena.discard(0, names[:1])
    assert view.held_tokens(prompt, "") == 0
    view.close()


def test_with_recurrent_layers_states_are_pinned_too(arena: Arena, settings: StoreSettings) -> None:
    view, prompt = with_states(settings), list(range(18))
    names = hashes(prompt, "")
    put(arena, 0, [*names, *STATES.names(names[1])])
    assert view.pin(prompt, "") == 2 * BLOCK
    assert arena.stats()["pinned"] == 2 + 2
    assert view.pin(prompt, "", pinned=False) == 2 * BLOCK
    assert arena.stats()["pinned"] == 0
    assert view.pin(list(range(50, 60)), "") == 0
    assert view.pin(prompt[: 2 * BLOCK], "") == 2 * BLOCK, "a prompt that ends with a block"
    view.close()


def test_pinned_blocks_stay(arena: Arena, settings: StoreSettings) -> None:
    view = StoreView(settings, lambda: DIGEST, hashes, BLOCK)
    prompt = list(range(12))
    put(arena, 0, hashes(prompt, "")[:2])
    assert view.pin(prompt, "") == 2 * BLOCK
    assert arena.stats()["pinned"] == 2
    assert view.pin(prompt, "", pinned=False) == 2 * BLOCK
    assert arena.stats()["pinned"] == 0
    view.close()


def test_until_the_engine_has_told_its_namespace_nothing_is_held_and_no_arena_made(
    settings: StoreSettings,
) -> None:
    view = StoreView(settings, lambda: b"", hashes, BLOCK)
    assert (view.held_tokens(range(8), ""), view.pin(range(8), ""), view.stats()) == (0, 0, {})
    assert not (settings.folder / "arena").exists()


def test_an_arena_that_is_not_there_is_never_made(settings: StoreSettings) -> None:
    view = StoreView(settings, lambda: DIGEST, hashes, BLOCK)
    assert (view.held_tokens(range(8), ""), view.pin(range(8), ""), view.stats()) == (0, 0, {})
    assert not (settings.folder / "arena").exists()


def test_an_arena_that_is_being_made_is_not_waited_for(settings: StoreSettings) -> None:
    path = settings.folder / "arena"
    lock = FileLock(os.open(path, os.O_RDWR | os.O_CREAT))
    os.ftruncate(lock.fd, 2**20)
    with lock:
        assert StoreView(settings, lambda: DIGEST, hashes, BLOCK).held_tokens(range(8), "") == 0
    lock.close()


def test_a_row_that_another_namespace_has_got_holds_nothing_of_ours(
    arena: Arena, settings: StoreSettings
) -> None:
    view = StoreView(settings, lambda: DIGEST, hashes, BLOCK)
    prompt = list(range(8))
    put(arena, 0, hashes(prompt, ""))
    assert view.held_tokens(prompt, "") == 2 * BLOCK
    arena.tables.namespaces["digest"][0] = 1
    assert view.held_tokens(prompt, "") == 0
    view.close()


def test_a_view_follows_an_arena_that_was_replaced(
    arena: Arena, settings: StoreSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace_kvstore.lookup.store_view.ARENA_CHECK_S", 0.0)
    view = StoreView(settings, lambda: DIGEST, hashes, BLOCK)
    prompt = list(range(8))
    put(arena, 0, hashes(prompt, ""))
    assert view.held_tokens(prompt, "") == 8
    arena.unlink()
    assert view.held_tokens(prompt, "") == 8, "engines go on with it"
    with Arena.create_or_attach(
        "arena", 2**20, folder=settings.folder, block_bytes=BLOCK_BYTES, layers=LAYERS
    ) as after:
        assert view.held_tokens(prompt, "") == 0
        row = after.register_namespace(DIGEST, BLOCK_BYTES, LAYERS)
        put(after, row, hashes(prompt, "")[:1])
        assert view.held_tokens(prompt, "") == 4
    view.close()


def test_an_arena_that_cannot_be_mapped_holds_nothing(tmp_path: Path) -> None:
    (tmp_path / "arena").write_bytes(b"no arena" * 1000)
    settings = StoreSettings(name="arena", dram_bytes=2**20, folder=tmp_path)
    view = StoreView(settings, lambda: DIGEST, hashes, BLOCK)
    assert view.held_tokens(range(8), "") == 0


@pytest.mark.parametrize("algorithm", ["sha256", "sha256_cbor"])
@pytest.mark.parametrize("salt", ["", "tenant-a"])
def test_blocks_are_hashed_as_vllm_does(algorithm: str, salt: str) -> None:
    from vllm import SamplingParams

    function = get_hash_fn_by_name(algorithm)
    kv_cache_utils.init_none_hash(function)
    prompt = list(range(100, 171))
    request = Request(
        "r",
        prompt,
        SamplingParams(max_tokens=1),
        None,
        cache_salt=salt or None,
        block_hasher=kv_cache_utils.get_request_block_hasher(16, function),
    )
    found = BlockHasher(algorithm, 16)(prompt, salt)
    assert len(found) == 4
    assert found == [bytes(block) for block in request.block_hashes]
