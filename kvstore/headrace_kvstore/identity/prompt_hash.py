"""vLLM's block hashes of a prompt under `sha256_cbor`, byte for byte, without vLLM.

vLLM hashes a block as

    sha256(canonical CBOR of (hash of the block before it, token ids, extra keys))

where the first block's parent is the hash of a seed, and the extra keys are null or a list of
tagged strings: ["lora", name, path] in every block of a request with an adapter, then
["cache_salt", salt] in the first. Only the tokens change in length,
so they are encoded for the whole prompt at once, and the bytes around them are the same for all
blocks. `tests/unit/test_prompt_hash.py` compares with vLLM.

Routers know a block by its *key*: the low 64 bits of its hash. vLLM's events carry such keys, too,
unless `VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES` is switched off.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from hashlib import sha256

import numpy as np
from numpy.typing import NDArray

from headrace_kvstore.numba_jit import jit

DIGEST_BYTES = 32
KEY_BYTES = 8
_BYTES, _TEXT, _ARRAY, _NULL = 2, 3, 4, b"\xf6"
_LONGEST_HEAD = 5
"""Bytes of a 32-bit number in CBOR."""


def root_hash(seed: str) -> bytes:
    """Return the parent hash of a first block (`vllm.v1.core.kv_cache_utils.NONE_HASH`)."""
    return sha256(_text(seed)).digest()


def hash_prompt(
    tokens: Sequence[int] | NDArray[np.integer],
    block_tokens: int,
    root: bytes,
    salt: str = "",
    lora: tuple[str, str] | None = None,
) -> list[bytes]:
    """Return the hashes of a prompt's full blocks, 32 bytes each.

    Args:
        tokens: token ids, [tokens].
        root: `root_hash` of the engines' seed.
        salt: the request's cache salt, if any.
        lora: name and path of its LoRA adapter, if any.

    Raises:
        ValueError: a token id is no number of 32 bits, or `root` is not 32 bytes long.
    """
    if len(root) != DIGEST_BYTES:
        raise ValueError(f"the root hash has {len(root)} bytes, not {DIGEST_BYTES}")
    blocks = len(tokens) // block_tokens
    if blocks == 0:
        return []
    ids = _as_u32(tokens, blocks * block_tokens)
    encoded = np.empty(_LONGEST_HEAD * ids.size, np.uint8)
    ends = np.empty(blocks, np.int64)
    _encode(ids, block_tokens, encoded, ends)
    data = encoded.tobytes()
    head = _head(_ARRAY, 3) + _head(_BYTES, DIGEST_BYTES)
    keys = [("lora", *lora)] if lora else []
    tail, last = _extra(keys), _extra([*keys, ("cache_salt", salt)] if salt else keys)
    array, parent, start = _head(_ARRAY, block_tokens), root, 0
    hashes: list[bytes] = []
    for end in ends.tolist():
        parent = sha256(head + parent + array + data[start:end] + last).digest()
        hashes.append(parent)
        start, last = end, tail  # the salt is in the first block only
    return hashes


def key_of(block_hash: bytes | int) -> int:
    """Return the key of one block."""
    if isinstance(block_hash, int):
        return block_hash & (1 << 8 * KEY_BYTES) - 1
    return int.from_bytes(block_hash[-KEY_BYTES:], "big")


def keys_of(hashes: Sequence[bytes | int]) -> NDArray[np.uint64]:
    """Return the keys of blocks, [blocks] u64. Hashes in bytes must have at least 8."""
    if not hashes:
        return np.zeros(0, np.uint64)
    try:
        if isinstance(hashes[0], int):
            return np.array(hashes, np.uint64)
        width = len(hashes[0])
        if width % KEY_BYTES == 0 and all([len(one) == width for one in hashes]):  # type: ignore[arg-type]
            words = np.frombuffer(b"".join(hashes), ">u8")  # type: ignore[arg-type]
            return words[width // KEY_BYTES - 1 :: width // KEY_BYTES].astype(np.uint64)
    except (TypeError, OverflowError, ValueError):
        pass  # both forms in one list
    return np.array([key_of(one) for one in hashes], np.uint64)


def _as_u32(tokens: Sequence[int] | NDArray[np.integer], count: int) -> NDArray[np.uint32]:
    if isinstance(tokens, np.ndarray):
        part = tokens[:count]
        if part.dtype != np.uint32 and (part.min() < 0 or part.max() >= 2**32):
            raise ValueError("token ids must be numbers of 32 bits")
        return np.ascontiguousarray(part, np.uint32)
    try:
        # Three times as fast as `np.asarray` of a list.
        packed = struct.pack(f"={count}I", *(tokens if len(tokens) == count else tokens[:count]))
    except struct.error as error:
        raise ValueError(f"token ids must be numbers of 32 bits: {error}") from None
    return np.frombuffer(packed, np.uint32)


def _head(major: int, value: int) -> bytes:
    """Return the beginning of a CBOR item."""
    if value < 24:
        return bytes([major << 5 | value])
    for more, size in enumerate((1, 2, 4)):
        if value < 1 << (8 * size):
            return bytes([major << 5 | 24 + more]) + value.to_bytes(size, "big")
    raise ValueError(f"{value} is too long")


def _text(text: str) -> bytes:
    data = text.encode()
    return _head(_TEXT, len(data)) + data


def _extra(keys: Sequence[tuple[str, ...]]) -> bytes:
    each = [_head(_ARRAY, len(key)) + b"".join(map(_text, key)) for key in keys]
    return _head(_ARRAY, len(keys)) + b"".join(each) if keys else _NULL


@jit()
def _encode(
    ids: NDArray[np.uint32], block: int, out: NDArray[np.uint8], ends: NDArray[np.int64]
) -> None:
    """Encode numbers in CBOR's shortest form, and record where each block of them ends."""
    at = 0
    for i in range(ids.size):
        one = np.int64(ids[i])
        if one < 24:
            out[at] = one
            at += 1
        elif one < 1 << 8:
            out[at] = 24
            out[at + 1] = one
            at += 2
        elif one < 1 << 16:
            out[at] = 25
            out[at + 1] = one >> 8
            out[at + 2] = one & 255
            at += 3
        else:
            out[at] = 26
            out[at + 1] = one >> 24
            out[at + 2] = one >> 16 & 255
            out[at + 3] = one >> 8 & 255
            out[at + 4] = one & 255
            at += 5
        if (i + 1) % block == 0:
            ends[i // block] = at
