"""One client of a Mooncake store: a program of `mooncake`, see `child`.

It runs apart because Mooncake's libraries must not enter this project's processes. Its engine's
cache is laid out as `stage.Stage`'s: [layers, blocks, layer bytes], blocks at scattered places.

put and get answer seconds, and take a shape:
    layers: each block from or into its place in every layer, one call for all
    whole: each block from or into one run of memory, which no engine's cache has; the best case
    pool: as whole, in memory that Mooncake allocated (of a standalone client's callers only)
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import time

import numpy as np

from benchmarks.kvstore.child import serve


class Node:
    """One client: embedded in this process, or a caller of a standalone one."""

    def __init__(self, args: argparse.Namespace) -> None:
        from mooncake.store import MooncakeDistributedStore  # type: ignore[import-not-found]

        self.args = args
        layers, blocks, layer_bytes = args.layers, args.blocks, args.layer_bytes
        self.size_bytes = layers * blocks * layer_bytes
        self.block_bytes = layers * layer_bytes
        self.cache = np.frombuffer(mmap.mmap(-1, self.size_bytes), np.uint8)
        self.cache = self.cache.reshape(layers, blocks, layer_bytes)
        self.store = MooncakeDistributedStore()
        self.places = np.random.default_rng(1).permutation(blocks)
        self.keys = [f"block-{i}" for i in range(blocks)]
        if args.standalone:
            self._require(self.store.setup_dummy(self.size_bytes, 1 << 24, args.standalone))
            address = self.store.alloc_from_mem_pool(self.size_bytes)
            room = (ctypes.c_uint8 * self.size_bytes).from_address(address)
            self.pool = np.frombuffer(room, np.uint8)
            self.pool[:] = 1
            self._require(self.store.register_buffer(address, self.size_bytes))
        else:
            self._require(
                self.store.setup(
                    *("127.0.0.1", "P2PHANDSHAKE", args.segment_bytes, 1 << 24),
                    *("tcp", "", args.master),
                )
            )
            self._require(self.store.register_buffer(self.cache.ctypes.data, self.size_bytes))

    def fill(self) -> None:
        """Give every block bytes that are its own."""
        for place, number in zip(self.places, range(self.args.blocks), strict=True):
            self.cache[:, place] = self._content(number)

    def check(self) -> None:
        """Raise RuntimeError unless the cache holds what `fill` would write."""
        for place, number in zip(self.places, range(self.args.blocks), strict=True):
            if not np.array_equal(self.cache[:, place], self._content(number)):
                raise RuntimeError(f"block {number} has other bytes")

    def wipe(self) -> None:
        self.cache[:] = 0

    def forget(self) -> None:
        """Empty the store."""
        self.store.remove_all(True)

    def put(self, shape: str) -> float:
        began = time.perf_counter()
        if self.args.standalone:
            if shape == "layers":
                for number, place in enumerate(self.places):
                    self._staged(number)[:] = self.cache[:, place]
            elif shape == "whole":
                np.copyto(self.pool, self.cache.reshape(-1))
            answers = self.store.batch_put_from(self.keys, self._runs(self.pool), self._sizes)
        elif shape == "layers":
            answers = self.store.batch_put_from_multi_buffers(self.keys, *self._pieces())
        else:
            answers = self.store.batch_put_from(self.keys, self._runs(self.cache), self._sizes)
        spent = time.perf_counter() - began
        self._require(*answers)
        return spent

    def get(self, shape: str) -> float:
        began = time.perf_counter()
        if self.args.standalone:
            answers = self.store.batch_get_into(self.keys, self._runs(self.pool), self._sizes)
            if shape == "layers":
                for number, place in enumerate(self.places):
                    self.cache[:, place] = self._staged(number)
            elif shape == "whole":
                np.copyto(self.cache.reshape(-1), self.pool)
        elif shape == "layers":
            answers = self.store.batch_get_into_multi_buffers(self.keys, *self._pieces())
        else:
            answers = self.store.batch_get_into(self.keys, self._runs(self.cache), self._sizes)
        spent = time.perf_counter() - began
        self._require(*(answer - self.block_bytes for answer in answers))
        return spent

    def close(self) -> None:
        self.store.close()

    @property
    def _sizes(self) -> list[int]:
        return [self.block_bytes] * self.args.blocks

    def _runs(self, memory: np.ndarray) -> list[int]:
        """Return the addresses of blocks that stand one after the other."""
        start = memory.ctypes.data
        return [start + i * self.block_bytes for i in range(self.args.blocks)]

    def _pieces(self) -> tuple[list[list[int]], list[list[int]]]:
        """Return the addresses and sizes of each block's layers."""
        at, size = self.cache.ctypes.data, self.args.layer_bytes
        steps = [at + layer * self.args.blocks * size for layer in range(self.args.layers)]
        addresses = [[step + int(place) * size for step in steps] for place in self.places]
        return addresses, [[size] * self.args.layers] * self.args.blocks

    def _staged(self, number: int) -> np.ndarray:
        begin = number * self.block_bytes
        run = self.pool[begin : begin + self.block_bytes]
        return run.reshape(self.args.layers, self.args.layer_bytes)

    def _content(self, number: int) -> np.ndarray:
        rng = np.random.default_rng(number)
        shape = (self.args.layers, self.args.layer_bytes)
        return rng.integers(0, 256, shape, dtype=np.uint8)

    @staticmethod
    def _require(*codes: int) -> None:
        wrong = [code for code in codes if code]
        if wrong:
            raise RuntimeError(f"Mooncake answered {wrong[0]}, {len(wrong)} of {len(codes)} times")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--master", default="")
    parser.add_argument("--standalone", default="", help="address of a standalone client")
    for name in ("segment-bytes", "layers", "blocks", "layer-bytes"):
        parser.add_argument(f"--{name}", type=int, required=True)
    args = parser.parse_args()
    serve(lambda: Node(args))


if __name__ == "__main__":
    main()
