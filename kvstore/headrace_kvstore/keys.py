"""What names a KV block: the namespace it belongs to, and its block hash.

Two blocks may stand for each other only if every byte of them would be the same. vLLM's block hash
covers what was computed (the tokens from the prompt's start, LoRA, multimodal input, salt); the
`Namespace` covers how: weights, number formats, parallel shard, block size, engine layout, codec.
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
KEY_BYTES = DIGEST_BYTES + HASH_BYTES
FORMAT_VERSION = 1
"""Version of payload, checksum and record formats together; one more makes all older blocks
strangers."""

_PERSON = b"headrace-kv-ns"
_INT_HASH_BYTES = 8


@dataclass(frozen=True)
class Namespace:
    """Everything that makes KV bytes incompatible or unequal. Compared and stored by `digest`.

    Raises:
        TypeError: a field is not of its type (the encoding depends on it).
        ValueError: model, dtype, layout or device is empty, or a rank or size is impossible.
    """

    model: str
    revision: str
    """Commit, or a digest of the weights' files where there is none."""
    quantization: str
    """Of the weights, where the engine quantises while loading; empty otherwise."""
    overrides: str
    """Whatever else was changed in the model's configuration (RoPE scaling, ...), canonically
    written; empty for none."""
    dtype: str
    kv_cache_dtype: str
    tp_rank: int
    """Where every rank holds the same bytes (MLA), a caller may write rank 0 for all."""
    tp_size: int
    pp_rank: int
    pp_size: int
    cp_rank: int
    """Context-parallel rank; decode and prefill context parallelism multiplied."""
    cp_size: int
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
    """Fingerprint of the seed of vLLM's root hash (see `namespace`)."""
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
        for name in ("model", "dtype", "kv_cache_dtype", "layout", "device", "codec"):
            if not getattr(self, name):
                raise ValueError(f"namespace: {name} is empty")
        for kind in ("tp", "pp", "cp"):
            rank, size = getattr(self, f"{kind}_rank"), getattr(self, f"{kind}_size")
            if not 0 <= rank < size:
                raise ValueError(f"namespace: {kind}_rank {rank} is not below {kind}_size {size}")
        if self.block_tokens <= 0:
            raise ValueError(f"namespace: block_tokens is {self.block_tokens}")

    @cached_property
    def digest(self) -> bytes:
        """16 bytes; equal only for equal namespaces."""
        return hashlib.blake2b(self.encoding, digest_size=DIGEST_BYTES, person=_PERSON).digest()

    @property
    def encoding(self) -> bytes:
        """The canonical JSON that `digest` is taken over."""
        text = json.dumps(self.as_dict(), sort_keys=True, separators=(",", ":"), ensure_ascii=True)
        return text.encode("ascii")

    def as_dict(self) -> dict[str, Any]:
        """All fields, strings and integers; `Namespace(**that)` is equal to this one."""
        return asdict(self)

    def describe(self) -> str:
        """One line for logs and status pages."""
        shards = [
            f"{kind} {getattr(self, f'{kind}_rank')}/{size}"
            for kind in ("tp", "pp", "cp")
            if (size := getattr(self, f"{kind}_size")) > 1
        ]
        parts = [
            f"{self.model}@{self.revision[:12]}" if self.revision else self.model,
            *([self.quantization] if self.quantization else []),
            *([f"overrides {self.overrides}"] if self.overrides else []),
            self.kv_cache_dtype,
            *shards,
            f"{self.block_tokens} tokens",
            f"{self.layout} on {self.device}",
            f"{self.codec} v{self.codec_version}",
            *([f"lossy: {self.technique}"] if self.technique else []),
        ]
        return f"{self.digest.hex()[:12]} " + ", ".join(parts)


def namespace(
    *,
    model: str,
    dtype: str,
    block_tokens: int,
    layout: str,
    device: str,
    hash_algorithm: str,
    hash_seed: str,
    engine: str,
    revision: str | None = None,
    quantization: str | None = None,
    overrides: Any = None,
    kv_cache_dtype: str = "auto",
    tp: tuple[int, int] = (0, 1),
    pp: tuple[int, int] = (0, 1),
    cp: tuple[int, int] = (0, 1),
    codec: str = "raw",
    codec_version: int = 1,
    technique: str = "",
) -> Namespace:
    """Build a namespace from the values an engine's configuration holds.

    Spellings of one meaning become one: `torch.bfloat16` and `bfloat16`, a `kv_cache_dtype` of
    `auto` and the model's own dtype, None and the empty string.

    Args:
        tp, pp, cp: (rank, size) of tensor, pipeline and context parallelism.
        hash_seed: what vLLM derived its root hash from (`get_none_hash_seed()`). Only its
            fingerprint is kept, since under a non-cryptographic algorithm the seed is a secret.
        overrides: JSON-able changes to the model's configuration; None or empty for none.

    Raises:
        TypeError, ValueError: as `Namespace`, or `overrides` is not JSON-able.
    """
    own = _plain_dtype(dtype)
    return Namespace(
        model=model,
        revision=revision or "",
        quantization=quantization or "",
        overrides=json.dumps(overrides, sort_keys=True, separators=(",", ":")) if overrides else "",
        dtype=own,
        kv_cache_dtype=own if kv_cache_dtype == "auto" else _plain_dtype(kv_cache_dtype),
        tp_rank=tp[0],
        tp_size=tp[1],
        pp_rank=pp[0],
        pp_size=pp[1],
        cp_rank=cp[0],
        cp_size=cp[1],
        block_tokens=block_tokens,
        engine=engine,
        layout=layout,
        device=device,
        hash_algorithm=hash_algorithm,
        hash_root=hashlib.blake2b(hash_seed.encode(), digest_size=8).hexdigest(),
        codec=codec,
        codec_version=codec_version,
        technique=technique,
    )


def padded_hash(block_hash: bytes | int) -> bytes:
    """A block hash as the 32 bytes that tables and keys hold.

    vLLM's hash is 32 bytes (`sha256`, `sha256_cbor`) or 16 (`xxhash`, `xxhash_cbor`); it is padded
    with zeros on the right. The namespace names the algorithm, so lengths never mix in one
    namespace. An int is the shortened form of KV events (the hash's last 8 bytes, big-endian): a
    name of its own, since the rest cannot be had back from it.

    Raises:
        TypeError: neither bytes nor int.
        ValueError: empty, too long, negative, over 64 bits, or all zeros (which marks no block).
    """
    if isinstance(block_hash, int) and not isinstance(block_hash, bool):
        if not 0 <= block_hash < 1 << 8 * _INT_HASH_BYTES:
            raise ValueError(f"block hash {block_hash} is not an unsigned 64-bit number")
        raw = block_hash.to_bytes(_INT_HASH_BYTES, "big")
    elif isinstance(block_hash, bytes | bytearray | memoryview):
        raw = bytes(block_hash)
    else:
        raise TypeError(f"block hash is {type(block_hash).__name__}, not bytes or int")
    if not raw or len(raw) > HASH_BYTES:
        hint = " (with a group id behind it?)" if len(raw) == HASH_BYTES + 4 else ""
        raise ValueError(f"block hash has {len(raw)} bytes{hint}, not 1 to {HASH_BYTES}")
    if not any(raw):
        raise ValueError("block hash is all zeros, which marks no block")
    return raw.ljust(HASH_BYTES, b"\0")


def block_key(digest: bytes, block_hash: bytes | int) -> bytes:
    """The 48-byte key of a block: namespace digest, then padded hash.

    Raises:
        TypeError, ValueError: as `padded_hash`, or the digest has not 16 bytes.
    """
    if len(digest) != DIGEST_BYTES:
        raise ValueError(f"namespace digest has {len(digest)} bytes, not {DIGEST_BYTES}")
    return digest + padded_hash(block_hash)


def split_key(key: bytes) -> tuple[bytes, bytes]:
    """Namespace digest and padded block hash of a key.

    Raises:
        ValueError: the key has not 48 bytes.
    """
    if len(key) != KEY_BYTES:
        raise ValueError(f"block key has {len(key)} bytes, not {KEY_BYTES}")
    return key[:DIGEST_BYTES], key[DIGEST_BYTES:]


def _plain_dtype(dtype: str) -> str:
    return dtype.removeprefix("torch.")
