"""One arena and many processes, some of which die."""

from __future__ import annotations

import ctypes
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from headrace_kvstore.arena import kernels
from headrace_kvstore.arena.arena import WRITER_TIMEOUT_S, Arena
from headrace_kvstore.arena.locking import FileLock
from headrace_kvstore.arena.shared_file import SharedFile
from headrace_kvstore.blocks.slot_record import WRITING
from tests.support.kvcheck import broken

BLOCK, LAYERS, BLOCKS, KEYS = 16_000, 4, 60, 200
DIGEST = b"d" * 16
LIBC = ctypes.CDLL(None)
PR_SET_PDEATHSIG = 1
TORN = 3
"""Exit status of a worker that read a block which is not its key's."""


def to_hash(number: int) -> bytes:
    return random.Random(number).randbytes(32)


HASHES = [to_hash(number) for number in range(KEYS)]


def sums_of(number: int) -> list[int]:
    return [number * LAYERS + layer for layer in range(LAYERS)]


def attach(folder: Path) -> Arena:
    return Arena.create_or_attach(
        "arena", BLOCKS * 20_000, folder=folder, block_bytes=BLOCK, layers=LAYERS
    )


def write(arena: Arena, row: int, numbers: list[int]) -> np.ndarray:
    """Reserve and copy in, in two halves so that a death in between would show."""
    slots = arena.reserve(row, [HASHES[n] for n in numbers], [0] * len(numbers), numbers)
    for number, slot in zip(numbers, slots, strict=True):
        if slot >= 0:
            block = arena.view(slot)
            block[: BLOCK // 2] = number + 1
            block[BLOCK // 2 :] = number + 1
    return slots


def read(arena: Arena, row: int, numbers: list[int]) -> int:
    """Lease, compare what is there with what belongs there; returns how many were.

    A block that another process discards meanwhile may be any other one by now.
    """
    slots = arena.lease(row, [HASHES[n] for n in numbers], 5.0)
    generations = arena.table["generation"][slots].copy()
    for number, slot, generation in zip(numbers, slots, generations, strict=True):
        if (
            slot >= 0
            and (
                (arena.view(slot) != (number + 1) % 256).any()
                or arena.sums(np.array([slot]))[0].tolist() != sums_of(number)
            )
            and arena.lookup(row, [HASHES[number]])[0] == slot
            and arena.table["generation"][slot] == generation
        ):
            os._exit(TORN)
    arena.release(slots)
    return int((slots >= 0).sum())


def work(folder: Path, seed: int) -> None:
    """Store and load at random for ever."""
    draw = random.Random(seed)
    arena = attach(folder)
    row = arena.register_namespace(DIGEST, BLOCK, LAYERS)
    while True:
        numbers = draw.sample(range(KEYS), 6)
        arena.lookup(row, [HASHES[n] for n in numbers])
        read(arena, row, numbers)
        slots = write(arena, row, numbers)
        mine = slots >= 0
        if draw.random() < 0.1:
            arena.abandon(slots)
        elif mine.any():
            sums = np.array([sums_of(n) for n, its in zip(numbers, mine, strict=True) if its])
            if not arena.publish(slots[mine], sums).all():
                os._exit(TORN)
        if draw.random() < 0.05:
            arena.discard(row, [HASHES[numbers[0]]])


def fork(target: Callable[[], None]) -> int:
    """Run `target` in a child that cleans up nothing at its end, and dies with its parent."""
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        try:
            LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            target()
        except BaseException as error:
            os.write(2, f"{error!r}\n".encode())
            os._exit(1)
        os._exit(0)
    return child


def end(child: int) -> int:
    """Wait for it; its exit status, or minus the signal that killed it."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.fixture
def arena(tmp_path: Path) -> Iterator[Arena]:
    with attach(tmp_path) as arena:
        arena.register_namespace(DIGEST, BLOCK, LAYERS)
        yield arena


def test_workers_killed_at_random_moments_harm_nobody(arena: Arena, tmp_path: Path) -> None:
    draw, started_s = random.Random(11), time.monotonic()
    workers = [fork(lambda seed=seed: work(tmp_path, seed)) for seed in range(3)]
    hits = round_ = 0
    try:
        # On a busy machine a worker may die before it ever ran: then this goes on.
        while round_ < 30 or not hits or arena.stats()["stored_total"] <= 100:
            round_ += 1
            time.sleep(draw.uniform(0.005, 0.05))
            victim = workers.pop(draw.randrange(3))
            os.kill(victim, signal.SIGKILL)
            numbers = draw.sample(range(KEYS), 6)
            hits += read(arena, 0, numbers)
            arena.abandon(write(arena, 0, numbers))
            assert end(victim) == -signal.SIGKILL
            assert broken(arena) == []
            workers.append(fork(lambda seed=100 + round_: work(tmp_path, seed)))
    finally:
        for worker in workers:
            os.kill(worker, signal.SIGKILL)
        ends = [end(worker) for worker in workers]
    assert ends == [-signal.SIGKILL] * 3
    # Once their time is over, all that the dead left can be had again.
    arena.words[0] |= 1
    assert broken(arena) == []
    left = arena.table["state"] == WRITING
    arena.table["stored_s"][left] -= WRITER_TIMEOUT_S
    write(arena, 0, list(range(KEYS)))
    assert arena.table["stored_s"][arena.table["state"] == WRITING].min() > started_s


def die(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(
    "step, call",
    [
        *((step, 1) for step in ("place", "commit", "write_sums", "publish", "lease")),
        *(("drop", call) for call in (1, 2, 3)),  # evicting, abandoning, discarding
    ],
)
def test_death_at_any_step_leaves_old_blocks_and_no_new_half_one(
    arena: Arena, monkeypatch: pytest.MonkeyPatch, step: str, call: int, after: bool
) -> None:
    old = list(range(40))
    slots = write(arena, 0, old)
    arena.publish(slots, np.array([sums_of(n) for n in old]))
    whole = getattr(kernels, step)

    calls = 0

    def deadly(*arguments: object) -> object:
        nonlocal calls
        calls += 1
        if calls < call:
            return whole(*arguments)
        if after:
            whole(*arguments)
        return die()

    def victim() -> None:
        monkeypatch.setattr(kernels, step, deadly)
        slots = write(arena, 0, list(range(100, 130)))
        arena.publish(slots[:15], np.array([sums_of(n) for n in range(100, 115)]))
        arena.abandon(slots[15:])
        arena.lease(0, HASHES[:1], 9.0)
        arena.discard(0, HASHES[:1])

    assert end(fork(victim)) == -signal.SIGKILL
    assert broken(arena) == []
    assert read(arena, 0, list(range(KEYS))) >= 20
    if arena.stats()["repairs_total"]:
        assert arena.events(0)[2]


def test_a_lost_writers_slot_is_free_again_when_its_time_is_over(tmp_path: Path) -> None:
    now_s = time.monotonic()
    with Arena.create_or_attach(
        "arena", 60_000, folder=tmp_path, block_bytes=BLOCK, layers=LAYERS, clock=lambda: now_s
    ) as arena:
        arena.register_namespace(DIGEST, BLOCK, LAYERS)
        assert end(fork(lambda: assert_(len(write(arena, 0, [1])) == 1))) == 0
        assert arena.stats()["writing"] == 1
        assert (write(arena, 0, [1]) == -1).all()
        now_s += WRITER_TIMEOUT_S + 1
        assert (write(arena, 0, [1]) >= 0).all()


def assert_(truth: bool) -> None:
    assert truth


def test_a_forked_child_has_locks_of_its_own(arena: Arena) -> None:
    def child() -> None:
        with arena.section:
            time.sleep(0.3)

    held = fork(child)
    time.sleep(0.1)
    waited_s = time.monotonic()
    with arena.section:
        waited_s = time.monotonic() - waited_s
        bystander = fork(lambda: time.sleep(30))
    with arena.section:
        pass  # what the bystander inherited keeps nothing
    assert end(held) == 0 and waited_s > 0.1
    os.kill(bystander, signal.SIGKILL)
    end(bystander)


def test_a_child_that_outlives_its_parent_does_not_keep_the_parents_lock(arena: Arena) -> None:
    def parent() -> None:
        with arena.section:
            fork(lambda: time.sleep(3))
            time.sleep(0.05)  # the child closes what it inherited
            die()

    assert end(fork(parent)) == -signal.SIGKILL
    assert broken(arena) == []


def test_many_create_the_same_arena_at_once(tmp_path: Path) -> None:
    def one(digest: bytes) -> None:
        with attach(tmp_path) as arena:
            row = arena.register_namespace(digest, BLOCK, LAYERS)
            assert arena.register_namespace(digest, BLOCK, LAYERS) == row

    children = [fork(lambda seed=seed: one(bytes([seed % 4] * 16))) for seed in range(12)]
    assert [end(child) for child in children] == [0] * 12
    with attach(tmp_path) as arena:
        assert len(arena.stats()["namespaces"]) == 4 and broken(arena) == []


def test_a_creator_that_dies_half_way_is_followed_by_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def creator() -> None:
        SharedFile.open(tmp_path / "arena", 1 << 20, die)

    assert end(fork(creator)) == -signal.SIGKILL
    with attach(tmp_path) as arena:
        assert broken(arena) == []


def test_an_unrelated_process_finds_what_another_stored(arena: Arena, tmp_path: Path) -> None:
    slots = write(arena, 0, [7])
    arena.publish(slots, np.array([sums_of(7)]))
    script = f"""
from headrace_kvstore.arena.arena import Arena
with Arena.create_or_attach("arena", {BLOCKS * 20_000}, folder={str(tmp_path)!r},
                            block_bytes={BLOCK}, layers={LAYERS}) as arena:
    row = arena.register_namespace({DIGEST!r}, {BLOCK}, {LAYERS})
    slot = arena.lease(row, [{HASHES[7]!r}], 1.0)[0]
    print(arena.view(slot).min(), arena.view(slot).max())
"""
    path = os.pathsep.join(entry for entry in sys.path if entry)
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["8", "8"]


def test_a_stopped_holder_does_not_hang_the_others(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    path.touch()
    lock = FileLock(os.open(path, os.O_RDWR))

    def holder() -> None:
        with lock:
            os.kill(os.getpid(), signal.SIGSTOP)

    child = fork(holder)
    os.waitpid(child, os.WUNTRACED)
    with pytest.raises(TimeoutError):
        lock.acquire(0.05)
    os.kill(child, signal.SIGKILL)
    end(child)
    lock.acquire(1.0)
    lock.release()
    lock.close()


def test_a_process_killed_inside_the_policy_leaves_it_of_use(tmp_path: Path) -> None:
    """It had the lock, and had written anything into the state."""

    def open_() -> Arena:
        return Arena.create_or_attach(
            "big", 32 << 20, folder=tmp_path, block_bytes=BLOCK, layers=LAYERS
        )

    arena = open_()
    row = arena.register_namespace(DIGEST, BLOCK, LAYERS)

    def die() -> None:
        with open_().policy as policy:
            for table in (policy._prompts, policy._blocks, policy._exposure_s):
                table.view(np.uint8)[:] = 0xF3
            os.kill(os.getpid(), signal.SIGKILL)

    child = fork(die)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    for first in range(0, KEYS, 20):
        assert arena.record_prompt(row, HASHES[first : first + 20])
        slots = write(arena, row, list(range(first, first + 20)))
        assert (slots >= 0).all()
    chosen = arena.policy.policy.choose(arena.table, time.monotonic(), 20)
    assert chosen.shape == (0,)  # all are being written yet
    arena.close()
