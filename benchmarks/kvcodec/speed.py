"""Bandwidths, in GB/s of the engine's bytes: codecs, a plain copy, the disk.

Everything runs on one core over more bytes than the caches hold, the arms taking turns.
"""

from __future__ import annotations

import mmap
import os
import statistics
import tempfile
import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from headrace_kvstore.codec import Codec, Coder, LayerShape

Bytes = npt.NDArray[np.uint8]
WORKING_SET_BYTES = 512 << 20
PIECE_BYTES = 4 << 20


def gb_s(size_bytes: int, call: Callable[[], None]) -> float:
    """Bandwidth of one call."""
    began = time.perf_counter()
    call()
    return size_bytes / (time.perf_counter() - began) / 1e9


def codec_speeds(
    codecs: dict[str, Codec], shape: LayerShape, rounds: int
) -> dict[str, dict[str, float]]:
    """For each codec its medians of `encode_gb_s` and `decode_gb_s`, and the copy's `copy_gb_s`."""
    count = WORKING_SET_BYTES // shape.layer_bytes
    numbers = np.random.default_rng(0).normal(size=shape.layer_bytes // 2).astype(np.float32)
    one = (numbers.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    engine = np.tile(one, (count, 1))
    target = np.ones_like(engine)  # ones: pages are there before the clock runs
    seen: dict[str, dict[str, list[float]]] = {}
    for _ in range(rounds):
        for name, codec in codecs.items():
            coder = codec.bind(shape)
            coder.warm()
            stored = np.ones((count, coder.stored_bytes), np.uint8)

            def encode(coder: Coder = coder, stored: Bytes = stored) -> None:
                for layer, out in zip(engine, stored, strict=True):
                    coder.encode(layer, out)

            def decode(coder: Coder = coder, stored: Bytes = stored) -> None:
                for out, layer in zip(stored, target, strict=True):
                    coder.decode(out, layer)

            arms = {
                "encode_gb_s": encode,
                "decode_gb_s": decode,
                "copy_gb_s": lambda: np.copyto(target, engine),
            }
            for arm, call in arms.items():
                speeds = seen.setdefault(name, {}).setdefault(arm, [])
                speeds.append(gb_s(engine.size, call))
    return {
        name: {arm: statistics.median(speeds) for arm, speeds in arms.items()}
        for name, arms in seen.items()
    }


def disk_gb_s(rounds: int) -> float:
    """Large reads past the page cache by one thread, from where temporary files live."""
    piece = mmap.mmap(-1, PIECE_BYTES)
    count = WORKING_SET_BYTES // PIECE_BYTES
    with tempfile.NamedTemporaryFile(dir=os.environ.get("TMPDIR", "/var/tmp")) as file:
        for _ in range(count):
            piece[:] = os.urandom(PIECE_BYTES)
            os.write(file.fileno(), piece)
        os.fsync(file.fileno())
        direct = os.open(file.name, os.O_RDONLY | os.O_DIRECT)
        try:

            def read() -> None:
                for at in range(count):
                    os.preadv(direct, [piece], at * PIECE_BYTES)

            return statistics.median(gb_s(WORKING_SET_BYTES, read) for _ in range(rounds))
        finally:
            os.close(direct)
