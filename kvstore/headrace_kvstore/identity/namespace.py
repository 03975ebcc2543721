"""The key of a KV block: the namespace it belongs to, and its block hash.

One block may replace another only if every byte of them would be the same. vLLM's block hash covers
the input of the computation (the tokens from the prompt's start, the adapter's name, multimodal
input, salt). The `Namespace` covers its conditions: weights, settings of the model, number formats,
parts of a layer, block size, engine layout, codec. Its digest and the block hash together are the
key, 48 bytes:

    key = blake2b-128(canonical JSON of all fields) || block hash, zero-padded to 32 bytes

Blocks of an adapter, and of an engine whose weights were changed while it ran, have another name in
place of their hash (`owned_name`).

The JSON has sorted keys, no spaces and only ASCII, and its values are strings and integers. So two
namespaces have the same encoding only if every field is equal. A new field changes every digest,
which makes caches cold but never wrong. Pure: imports no engine.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from typing import Any, ClassVar

DIGEST_BYTES = 16
HASH_BYTES = 32
FORMAT_VERSION = 2
"""Version of payload, checksum and record formats together. Incrementing it invalidates all stored
blocks."""

_PERSON = b"headrace-kv-ns"
_OWNED_PERSON = b"headrace-kv-own"


@dataclass(frozen=True)
class KvIdentity:
    """Everything that the KV of given tokens depends on. Engines that differ in it share no KV.

    The store's namespaces, the proofs of pulls and the kinds of replicas are all made of it.
    Different spellings of one meaning become equal: `torch.bfloat16` and `bfloat16`, a
    `kv_cache_dtype` of `auto` and the model's own dtype.

    Raises:
        TypeError: a field is not of its type (the encoding depends on it).
        ValueError: model, a dtype or device is empty, or a size is impossible.
    """

    model: str
    revision: str
    """Commit, or a digest of the weights' files or objects."""
    settings: str
    """All other settings of the model that are not the default, as JSON; see `canonical`."""
    max_model_len: int
    """Maximum length, by which some models choose rotary factors or attention temperatures."""
    dtype: str
    kv_cache_dtype: str
    engine: str
    """Engine and libraries with their versions: kernels of another version may pack or round
    otherwise."""
    device: str
    """Device kind, or the instruction set that the CPU kernels pack for."""

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
        for name in self._NAMES:
            if not getattr(self, name):
                raise ValueError(f"namespace: {name} is empty")
        for name in self._SIZES:
            if getattr(self, name) <= 0:
                raise ValueError(f"namespace: {name} is {getattr(self, name)}")

    _NAMES: ClassVar[tuple[str, ...]] = ("model", "revision", "dtype", "kv_cache_dtype", "device")
    _SIZES: ClassVar[tuple[str, ...]] = ("max_model_len",)

    @property
    def encoding(self) -> bytes:
        """Bytes that are equal only for equal identities."""
        return canonical(asdict(self)).encode("ascii")


@dataclass(frozen=True)
class Namespace(KvIdentity):
    """Everything that makes KV bytes incompatible or unequal: their identity, and how they lie in a
    block. Compared and stored by `digest`."""

    layers: int
    """Number of layers that a block holds, in all."""
    speculative: str
    """The draft model that some of the layers belong to; empty if all are the model's own."""
    parts: int
    """Number of parts of each layer, as `headrace_kvstore.blocks.sharding` cuts it. This alone
    describes the tensor-parallel size: a block holds the KV of all ranks, and data-parallel ranks
    compute the same KV."""
    block_tokens: int
    layout: str
    """The engine's name for its cache layout and attention backend."""
    hash_algorithm: str
    """vLLM's `prefix_caching_hash_algo`."""
    hash_root: str
    """`fingerprint` of the seed of vLLM's root hash."""
    codec: str
    codec_version: int
    technique: str
    """Technique of lossy KV, with the parameters that matter; empty if the KV is exact."""
    format_version: int = FORMAT_VERSION

    _NAMES: ClassVar[tuple[str, ...]] = (*KvIdentity._NAMES, "layout", "codec")
    _SIZES: ClassVar[tuple[str, ...]] = (*KvIdentity._SIZES, "parts", "block_tokens")

    @cached_property
    def digest(self) -> bytes:
        """16 bytes; equal only for equal namespaces."""
        return hashlib.blake2b(self.encoding, digest_size=DIGEST_BYTES, person=_PERSON).digest()

    def describe(self) -> str:
        """Return one line for logs: the digest, and all fields that are not empty."""
        known = {name: value for name, value in asdict(self).items() if value != ""}
        return f"{self.digest.hex()[:12]} {canonical(known)}"


def canonical(value: Any) -> str:
    """Return JSON that is equal for equal values, ASCII only. Raises TypeError if there is none."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)


def fingerprint(seed: str) -> str:
    """Return a digest that distinguishes hash seeds without revealing them: under a
    non-cryptographic algorithm the seed is a secret."""
    return hashlib.blake2b(seed.encode(), digest_size=8).hexdigest()


def owned_name(block_hash: bytes, owner: bytes) -> bytes:
    """Return the name of a block, 32 bytes, that only engines with the same `owner` give it.
    `owner` describes everything else that its KV depends on, beyond hash and namespace, in 1 to 64
    bytes."""
    return hashlib.blake2b(
        block_hash, digest_size=HASH_BYTES, key=owner, person=_OWNED_PERSON
    ).digest()


def block_key(digest: bytes, block_hash: bytes) -> bytes:
    """Return the 48-byte key of a block: namespace digest, then the hash padded with zeros on the
    right.

    vLLM's hash is 32 bytes (`sha256`, `sha256_cbor`) or 16 (`xxhash`, `xxhash_cbor`). The namespace
    names the algorithm, so lengths never mix in one namespace.

    Raises:
        ValueError: the digest is not 16 bytes long; the hash is empty, too long, or all zeros
            (which means no block).
    """
    if len(digest) != DIGEST_BYTES:
        raise ValueError(f"namespace digest has {len(digest)} bytes, not {DIGEST_BYTES}")
    if not block_hash or len(block_hash) > HASH_BYTES:
        hint = " (with a group id behind it?)" if len(block_hash) == HASH_BYTES + 4 else ""
        raise ValueError(f"block hash has {len(block_hash)} bytes{hint}, not 1 to {HASH_BYTES}")
    if not any(block_hash):
        raise ValueError("block hash is all zeros, which marks no block")
    return digest + bytes(block_hash).ljust(HASH_BYTES, b"\0")
