"""Keys of prompts' blocks as engines with vLLM's default seed have them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from headrace_kvstore.identity.prompt_hash import hash_prompt, keys_of, root_hash

DEFAULT_SEED = "vllm-none-hash"
"""vLLM's default seed, used unless PYTHONHASHSEED or a random seed replaces it."""


class PromptKeys:
    """Keys of prompts, for engines with one block size, one seed and `sha256_cbor`.

    Args:
        seed: the seed from which the engines derive their root hash.
    """

    def __init__(self, block_tokens: int, seed: str = DEFAULT_SEED) -> None:
        if block_tokens < 1:
            raise ValueError(f"block_tokens must be at least 1, not {block_tokens}")
        self.block_tokens, self._root = block_tokens, root_hash(seed)

    def hashes(
        self,
        tokens: Sequence[int] | NDArray[np.integer],
        salt: str = "",
        lora: tuple[str, str] | None = None,
    ) -> list[bytes]:
        """Return a prompt's block hashes, equal to vLLM's.

        Raises:
            ValueError: a token id has more than 32 bits.
        """
        return hash_prompt(tokens, self.block_tokens, self._root, salt, lora)

    def keys(
        self,
        tokens: Sequence[int] | NDArray[np.integer],
        salt: str = "",
        lora: tuple[str, str] | None = None,
    ) -> NDArray[np.uint64]:
        """Return the keys of a prompt's full blocks, [blocks] u64."""
        return keys_of(self.hashes(tokens, salt, lora))
