"""What names a KV block: the namespace it belongs to, and its block hash.

Two blocks may stand for each other only if every byte of them would be the same. vLLM's block hash
covers what was computed (the tokens from the prompt's start, LoRA, multimodal input, salt); the
`Namespace` covers how: weights, number formats, parts of a layer, block size, engine layout, codec.
Its digest and the block hash together are the key, 48 bytes:

    key = blake2b-128(canonical JSON of all fields) || block hash, zero-padded to 32 bytes

The JSON has sorted keys, no spaces and only ASCII, and its values are strings and integers, so
that two namespaces have the same encoding only if every field is equal. Adding a field changes
every digest, which makes a cache cold and never wrong. Pure: imports no engine.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from typing import Any

DIGEST_BYTES = 16
HASH_BYTES = 32
FORMAT_VERSION = 2
"""Version of payload, checksum and record formats together; one more makes all older blocks
strangers."""

_PERSON = b"headrace-kv-ns"


@dataclass(frozen=True)
class Namespace:
    """Everything that makes KV bytes incompatible or unequal. Compared and stored by `digest`.

    Spellings of one meaning become one: `torch.bfloat16` and `bfloat16`, a `kv_cache_dtype` of
    `auto` and the model's own dtype.

    Raises:
        TypeError: a field is not of its type (the encoding depends on it).
        ValueError: model, dtype, layout or device is empty, or a size is impossible.
    """

    model: str
    revision: str
    """Commit, or a digest of the weights' files where there is none."""
    quantization: str
    """Of the weights, where the engine quantises while loading; empty otherwise."""
    overrides: str
    """Other changes to the model's configuration (RoPE scaling, ...); see `canonical`."""
    layers: int
    """That a block holds, in all."""
    speculative: str
    """The draft model that some of them belong to; empty where all are the model's own."""
    dtype: str
    kv_cache_dtype: str
    parts: int
    """Of each layer, as `headrace_kvstore.parts` cuts it. Tensor-parallel sizes are named by this
    alone: a block holds the KV of all ranks, which data-parallel ones compute alike."""
    block_tokens: int
    engine: str
    """Engine and version: kernels of another version may pack or round otherwise."""
    layout: str
    """The engine's name for its cache layout and attention backend."""
    device: str
    """Device kind, or the instruction set that the CPU kernels pack for."""
    hash_algorithm: str
    """vLLM's `prefix_caching_hash_algo`."""
    hash_root: str
    """`fingerprint` of the seed of vLLM's root hash."""
    codec: str
    codec_version: int
    technique: str
    """Empty unless the KV is lossy: then which technique, with the parameters that matter."""
    format_version: int = FORMAT_VERSION

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            wanted = int if field.type == "int" else str
            if type(value) is not wanted:
                raise TypeError(f"namespace: {field.name} is {value!r}, not {wanted.__name__}")
        own = self.dtype.removeprefix("torch.")
        kv = own if self.kv_cache_dtype == "auto" else self.kv_cache_dtype.removeprefix("torch.")
        object.__setattr__(self, "dtype", own)
        object.__setattr__(self, "kv_cache_dtype", kv)
        for name in ("model", "dtype", "kv_cache_dtype", "layout", "device", "codec"):
            if not getattr(self, name):
                raise ValueError(f"namespace: {name} is empty")
        for name in ("parts", "block_tokens"):
            if getattr(self, name) <= 0:
                raise ValueError(f"namespace: {name} is {getattr(self, name)}")

    @cached_property
    def digest(self) -> bytes:
        """16 bytes; equal only for equal namespaces."""
        encoding = canonical(asdict(self)).encode("ascii")
        return hashlib.blake2b(encoding, digest_size=DIGEST_BYTES, person=_PERSON).digest()

    def describe(self) -> str:
        """One line for logs: the digest, and all fields that say something."""
        known = {name: value for name, value in asdict(self).items() if value != ""}
        return f"{self.digest.hex()[:12]} {canonical(known)}"


def canonical(value: Any) -> str:
    """JSON that is equal for equal values, ASCII only. TypeError if there is none."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)


def fingerprint(seed: str) -> str:
    """Tells hash seeds apart without telling them: under a non-cryptographic algorithm the seed is
    a secret."""
    return hashlib.blake2b(seed.encode(), digest_size=8).hexdigest()


def block_key(digest: bytes, block_hash: bytes) -> bytes:
    """The 48-byte key of a block: namespace digest, then the hash padded with zeros on the right.

    vLLM's hash is 32 bytes (`sha256`, `sha256_cbor`) or 16 (`xxhash`, `xxhash_cbor`). The namespace
    names the algorithm, so lengths never mix in one namespace.

    Raises:
        ValueError: the digest has not 16 bytes; the hash is empty, too long, or all zeros (which
            marks no block).
    """
    if len(digest) != DIGEST_BYTES:
        raise ValueError(f"namespace digest has {len(digest)} bytes, not {DIGEST_BYTES}")
    if not block_hash or len(block_hash) > HASH_BYTES:
        hint = " (with a group id behind it?)" if len(block_hash) == HASH_BYTES + 4 else ""
        raise ValueError(f"block hash has {len(block_hash)} bytes{hint}, not 1 to {HASH_BYTES}")
    if not any(block_hash):
        raise ValueError("block hash is all zeros, which marks no block")
    return digest + bytes(block_hash).ljust(HASH_BYTES, b"\0")
