"""What the block checksum is, bit for bit, what it sees, and what the batched copies promise."""

from __future__ import annotations

import os
import threading
from typing import Any

import numpy as np
import pytest

from headrace_kvstore.blocks import checksum as sums
from headrace_kvstore.numba_jit import jit
from tests.support.kvsums import Memory, mix, model_sum

DIGEST = bytes(range(16))
HASH = bytes(range(32, 64))
RAMP = bytes(at * 7 % 256 for at in range(1000))
GOLDEN_EMPTY = 0x543EA0EE26305108
GOLDEN_ZEROS = 0x0C736B791997263D
GOLDEN_RAMP = 0xC6723F226F225757
GOLDEN_SEED = 0xB04B231267C84C1F
GOLDEN_LAYERS = [0x349D4A8C8448137D, 0xD6FF7A2D9826D8BA]


def test_the_sums_of_these_bytes_never_change() -> None:
    """Stored blocks carry them: a change needs a new `namespace.FORMAT_VERSION`."""
    assert sums.checksum_of(b"", 0) == GOLDEN_EMPTY
    assert sums.checksum_of(bytes(64), 1) == GOLDEN_ZEROS
    assert sums.checksum_of(RAMP, 0xFEEDFACE) == GOLDEN_RAMP
    assert sums.block_seed(DIGEST, HASH) == GOLDEN_SEED
    assert sums.layer_seeds(GOLDEN_SEED, 2).tolist() == GOLDEN_LAYERS


@pytest.mark.parametrize("size", [0, 1, 63, 64, 65, 128, 4096 + 64, 4096 + 67])
@pytest.mark.parametrize("shift", [0, 1, 32])
def test_copy_and_sum_agree_with_the_model(size: int, shift: int) -> None:
    data = np.random.default_rng(size).bytes(size)
    src, dst = Memory(size, shift), Memory(size + 2, shift)
    src.put(data)
    found = sums.copy_sum([dst.address], [src.address], [size], [5])
    assert found.tolist() == [model_sum(data, 5)]
    assert dst.get() == data + bytes(2)
    assert sums.checksum([dst.address], [size], [5]).tolist() == found.tolist()


def test_words_are_wide_enough_to_keep_carries() -> None:
    """All ones, so long that 32-bit sums would have wrapped many times."""
    data = b"\xff" * 64 * 300
    assert sums.checksum_of(data, 9) == model_sum(data, 9)


def test_large_batches_take_the_streaming_path_and_give_the_same_sums_and_bytes() -> None:
    size, runs = 98_304, 12
    assert runs * size >= sums.STREAM_FROM_BYTES
    src, dst = Memory(runs * size), Memory(runs * size)
    src.put(np.random.default_rng(0).bytes(runs * size))
    at = np.arange(runs) * size
    order = np.random.default_rng(1).permutation(runs)
    found = sums.copy_sum(dst.address + at[order], src.address + at, size, np.arange(runs))
    for run in range(runs):
        assert dst.get(at[order[run]], size) == src.get(at[run], size)
    one_by_one = [sums.checksum_of(src.bytes[a : a + size], n) for n, a in enumerate(at)]
    assert found.tolist() == one_by_one
    dst.bytes[:] = 0
    sums.copy(dst.address + at, src.address + at, size)
    assert dst.get() == src.get()


@pytest.mark.parametrize("misaligned", [16, 63])
def test_misaligned_destinations_are_slower_and_right(misaligned: int) -> None:
    size = sums.STREAM_FROM_BYTES + 7
    src, dst = Memory(size, 3), Memory(size, misaligned)
    src.put(np.random.default_rng(0).bytes(size))
    found = sums.copy_sum([dst.address], [src.address], size, [1])
    assert dst.get() == src.get()
    assert int(found[0]) == sums.checksum_of(src.bytes, 1)
    dst.bytes[:] = 0
    sums.copy([dst.address], [src.address], size)
    assert dst.get() == src.get()


def test_a_run_of_pieces_has_the_sum_of_their_concatenation() -> None:
    data = RAMP[:640]
    src = Memory(4096)
    src.put(data[:256], at=0)
    src.put(data[256:], at=2048)
    dst = Memory(640)
    found = sums.copy_sum(
        [[dst.address, dst.address + 256]], [[src.address, src.address + 2048]], [256, 384], [3]
    )
    assert dst.get() == data
    assert found.tolist() == [model_sum(data, 3)]


def test_any_number_of_threads_gives_the_same() -> None:
    sizes = np.array([2_000_000, 64, 0, 1_000_001, 3_000_000, 5])
    total = int(sizes.sum())
    assert total >= sums.THREADS_FROM_BYTES
    src, dst = Memory(total), Memory(total)
    src.put(np.random.default_rng(0).bytes(total))
    at = np.cumsum(sizes) - sizes
    seeds = np.arange(sizes.size)
    alone = sums.checksum(src.address + at, sizes, seeds)
    for threads in (2, 3, 16):
        dst.bytes[:] = 0
        shared = sums.copy_sum(dst.address + at, src.address + at, sizes, seeds, threads=threads)
        assert shared.tolist() == alone.tolist()
        assert dst.get() == src.get()


def test_a_forked_child_shares_batches_too() -> None:
    """It has none of its parent's threads."""
    size = 2 * sums.THREADS_FROM_BYTES
    src = Memory(size)
    sizes = np.full(2, size // 2)
    at = src.address + np.array([0, size // 2])
    here = sums.checksum(at, sizes, np.arange(2), threads=2)
    child = os.fork()
    if not child:
        there = sums.checksum(at, sizes, np.arange(2), threads=2)
        os._exit(0 if (there == here).all() else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_other_threads_run_while_a_batch_does() -> None:
    """The GIL is released for the whole batch: a thread that is woken counts on before it ends.
    On a busy machine a batch can end before the other thread gets a core, so there are several."""
    size = 16 << 20
    src = Memory(size)
    at = np.full(40, src.address)
    sums.prepare()

    def ran_during_a_batch() -> int:
        ran = 0
        finished = threading.Event()

        def batch() -> None:
            sums.checksum(at, size, np.zeros(40))
            finished.set()

        thread = threading.Thread(target=batch)
        thread.start()
        while not finished.wait(0.001):
            ran += 1
        thread.join()
        return ran

    assert any(ran_during_a_batch() >= 2 for _ in range(30))


def test_code_that_cannot_be_kept_on_disk_is_compiled_all_the_same() -> None:
    """As in a container whose every folder is read-only: here, a function without a file."""
    made: dict[str, Any] = {}
    exec("def twice(x): return 2 * x", made)
    assert jit()(made["twice"])(21) == 42


def test_nothing_to_do_is_done() -> None:
    assert sums.copy_sum([], [], 0, []).shape == (0,)
    sums.copy([], [], 0)


def test_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="destinations"):
        sums.copy_sum([1, 2], [1], 0, [1])
    with pytest.raises(ValueError, match="addresses of shape"):
        sums.copy_sum([1, 2], [1, 2], 0, [1])


class TestDamage:
    """Each on 512 bytes, so that every bit and every row is tried."""

    DATA = np.random.default_rng(4).bytes(512)

    def unlike(self, damaged: bytes) -> bool:
        return sums.checksum_of(damaged, 7) != sums.checksum_of(self.DATA, 7)

    def test_any_flipped_bit(self) -> None:
        for bit in range(8 * len(self.DATA)):
            damaged = bytearray(self.DATA)
            damaged[bit // 8] ^= 1 << bit % 8
            assert self.unlike(bytes(damaged))

    @pytest.mark.parametrize("bit", [0, 31, 63])
    def test_the_same_bit_flipped_twice_in_one_lane(self, bit: int) -> None:
        """Sums as wide as the words would lose the top bit's second flip at even distances."""
        for rows in range(1, 8):
            damaged = bytearray(self.DATA)
            for row in (0, rows):
                damaged[64 * row + bit // 8] ^= 1 << bit % 8
            assert self.unlike(bytes(damaged))

    @pytest.mark.parametrize("distance", [4, 8, 60, 64, 128, 256])
    def test_swapped_words(self, distance: int) -> None:
        damaged = bytearray(self.DATA)
        one, two = damaged[0:4], damaged[distance : distance + 4]
        damaged[0:4], damaged[distance : distance + 4] = two, one
        assert self.unlike(bytes(damaged))

    def test_truncated_shifted_zeroed_and_lengthened(self) -> None:
        data = self.DATA
        for size in range(len(data)):
            assert self.unlike(data[:size])
            assert self.unlike(data[:size] + bytes(len(data) - size))
            assert self.unlike(bytes(len(data) - size) + data[:size])
        assert self.unlike(data + b"\0")

    def test_the_bytes_of_another_block_layer_or_namespace(self) -> None:
        """Even of zeros, which all blocks may hold alike."""
        zeros = bytes(4096)
        seeds = {
            int(seed)
            for digest in (DIGEST, bytes(16))
            for block in (HASH, HASH[:16], b"\x01")
            for seed in sums.layer_seeds(sums.block_seed(digest, block), 80)
        }
        assert len(seeds) == 2 * 3 * 80
        assert len({sums.checksum_of(zeros, seed) for seed in seeds}) == len(seeds)


def test_layer_seeds_are_mixed_from_the_blocks() -> None:
    found = sums.layer_seeds([3, 2**64 - 1], 3)
    assert found.shape == (2, 3)
    assert found.dtype == np.uint64
    step = 0x9E3779B97F4A7C15
    assert int(found[1, 2]) == mix((2**64 - 1 + 3 * step) % 2**64)


def test_a_seed_wants_a_digest_and_a_hash() -> None:
    with pytest.raises(ValueError, match="digest"):
        sums.block_seed(b"short", HASH)
    with pytest.raises(ValueError, match="hash"):
        sums.block_seed(DIGEST, b"")
    assert sums.block_seed(DIGEST, HASH[:16]) == sums.block_seed(DIGEST, HASH[:16] + bytes(16))
