"""The keys by which the router knows a prompt's blocks: of vLLM's own hashes.

A key is the low 64 bits of a block hash, which is also how vLLM's events carry hashes unless they
are told otherwise (`VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES`). So a prompt that is hashed here meets
blocks that were told of in either form.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from headrace_kvstore.prompt_hash import hash_prompt, root_hash

KEY_BYTES = 8
LEAST_HASH_BYTES, MOST_HASH_BYTES = KEY_BYTES, 32
DEFAULT_SEED = "vllm-none-hash"
"""vLLM's own, where neither PYTHONHASHSEED nor a random seed takes its place."""


def key_of(block_hash: bytes | int) -> int:
    """The key of one block."""
    if isinstance(block_hash, int):
        return block_hash & (1 << 8 * KEY_BYTES) - 1
    return int.from_bytes(block_hash[-KEY_BYTES:], "big")


def keys_of(hashes: Sequence[bytes | int]) -> NDArray[np.uint64]:
    """Keys of blocks, [blocks] u64. Hashes in bytes must have at least 8."""
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


class PromptKeys:
    """Keys of prompts, for engines with one block size, one seed and `sha256_cbor`.

    Args:
        seed: what the engines derive their root hash from.
    """

    def __init__(self, block_tokens: int, seed: str = DEFAULT_SEED) -> None:
        if block_tokens < 1:
            raise ValueError(f"block_tokens must be at least 1, not {block_tokens}")
        self.block_tokens, self._root = block_tokens, root_hash(seed)

    def hashes(
        self, tokens: Sequence[int] | NDArray[np.integer], salt: str = "", lora: str = ""
    ) -> list[bytes]:
        """Block hashes of a prompt, as vLLM's. ValueError for ids of more than 32 bits."""
        return hash_prompt(tokens, self.block_tokens, self._root, salt, lora)

    def keys(
        self, tokens: Sequence[int] | NDArray[np.integer], salt: str = "", lora: str = ""
    ) -> NDArray[np.uint64]:
        """Keys of its full blocks, [blocks] u64."""
        return keys_of(self.hashes(tokens, salt, lora))
