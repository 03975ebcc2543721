"""The identity of a hand-out: the producer's record of it, and when a puller believes it.

A producer keeps one record of 64 bytes for each hand-out in memory that pullers can read. It writes
the record before the reference to the blocks goes out, and erases it before another request can get
the blocks. A puller reads the record *after* it has read the blocks. Generations are never used
twice. So a record that is still there then was there during the whole pull, and so were the blocks.
Pure.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

PARAMS_KEY = "headrace_identity"
"""Key of the claim in a hand-out's transfer parameters."""
ID_BYTES = 16
RECORD_BYTES = 64
RECORD = struct.Struct("<4sHH16sQ16sII8x")
MAGIC, VERSION, CHECKED = b"HRKV", 1, 1

UNSUMMED, SUMMED, NO_SUMS = 0, 1, 2
"""State of the fingerprints of a checked hand-out: not there yet, beside the record, or never."""

_MAX_RANKS = 4096
_PERSON = b"headrace-handout"


@dataclass(frozen=True, slots=True)
class Identity:
    """One hand-out of blocks."""

    incarnation: bytes
    """Random, 16 bytes, drawn at each start of the producing engine."""
    generation: int
    """Number of the hand-out; counts up through an incarnation."""
    digest: bytes
    """Digest of the prompt, 16 bytes: `prompt_digest`."""
    tokens: int
    """Tokens of the prompt, as the producer computed it."""
    checked: bool
    """Whether its blocks have fingerprints."""

    def record(self, state: int = UNSUMMED) -> bytes:
        """Return the 64 bytes that the producer keeps while it holds the blocks."""
        flags = CHECKED if self.checked else 0
        fields = self.incarnation, self.generation, self.digest, self.tokens, state
        return RECORD.pack(MAGIC, VERSION, flags, *fields)

    def proof(self, blocks: Sequence[Sequence[int]]) -> bytes:
        """Return 16 bytes that tie the numbers of the blocks to this hand-out."""
        hashed = hashlib.blake2b(self.record(), digest_size=ID_BYTES, person=_PERSON)
        for group in blocks:
            hashed.update(len(group).to_bytes(8, "little"))
            hashed.update(np.asarray(group, "<i8").tobytes())
        return hashed.digest()


def prompt_digest(
    engine: bytes, salt: str, adapter: bytes, token_ids: Sequence[int], media: bytes = b""
) -> bytes:
    """Return 16 bytes that differ if anything differs on which a prompt's KV depends.

    Args:
        engine: everything of the engine that its KV depends on (`KvIdentity.encoding`), and its
            epoch.
        salt: the cache salt, which contains the tenant. adapter: digest of the LoRA adapter, or
            empty.
        token_ids: of the whole prompt, so that a difference anywhere in it shows.
        media: digest of its images, sound and video, or empty: all images have the same tokens.
    """
    hashed = hashlib.blake2b(digest_size=ID_BYTES, person=_PERSON)
    for part in (engine, salt.encode(), adapter, media):
        hashed.update(len(part).to_bytes(8, "little"))
        hashed.update(part)
    hashed.update(np.asarray(token_ids, "<u4").tobytes())
    return hashed.digest()


class Unproved(Exception):
    """KV must not be used.

    Attributes:
        kind: for metrics, one of
            `unknown`: the reference has no identity, or one that cannot be read
            `reference`: it belongs to another prompt or to other blocks
            `range`: it names blocks that the producer does not have
            `gone`: the producer no longer holds the blocks (lease ended, pulled before, aborted)
            `reused`: another hand-out has the record's place
            `restarted`: the producer has started again since
            `prompt`: the blocks were made for another prompt
            `content`: bytes differ from those that were computed
            `late`: the record or the fingerprints did not come in time
            `unreachable`: the handshake or the transfer failed
    """

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(kind, text)
        self.kind, self.text = kind, text

    def __str__(self) -> str:
        return self.text


def believe(expected: Identity, found: bytes) -> int:
    """Check the record that was read after the blocks.

    Args:
        found: the 64 bytes.

    Returns:
        `UNSUMMED`, `SUMMED` or `NO_SUMS`.

    Raises:
        Unproved: the blocks may not be the hand-out's.
    """
    magic, version, flags, incarnation, generation, digest, tokens, state = RECORD.unpack(found)
    if not any(found[: RECORD.size]):
        raise Unproved("gone", "the prefill engine holds the blocks no more")
    if magic != MAGIC or version != VERSION:
        raise Unproved("unknown", "no record of a hand-out lies where the reference says")
    if incarnation != expected.incarnation:
        raise Unproved("restarted", "the prefill engine has started again since the hand-out")
    if generation != expected.generation:
        raise Unproved(
            "reused", f"the blocks are of hand-out {generation}, not {expected.generation}"
        )
    if (digest, tokens) != (expected.digest, expected.tokens):
        raise Unproved("prompt", "the blocks were made for another prompt")
    if flags != (CHECKED if expected.checked else 0):
        raise Unproved("unknown", "the record and the reference differ on fingerprints")
    return int(state)


@dataclass(frozen=True, slots=True)
class Claim:
    """Content of a reference, which is not trusted before the proof.

    Attributes:
        identity: of the hand-out. Its digest is zero until `own` puts in the puller's.
        places: address of the record by (pipeline rank, tensor rank) of the producer.
        proof: `Identity.proof` of the producer.
    """

    identity: Identity
    places: Mapping[tuple[int, int], int]
    proof: bytes

    def params(self) -> dict[str, Any]:
        """Return the claim as vLLM's transfer parameters carry it."""
        return {
            "incarnation": self.identity.incarnation.hex(),
            "generation": self.identity.generation,
            "tokens": self.identity.tokens,
            "checked": self.identity.checked,
            "places": [[*rank, address] for rank, address in self.places.items()],
            "proof": self.proof.hex(),
        }

    def own(self, digest: bytes, blocks: Sequence[Sequence[int]]) -> Claim:
        """Return the claim with the puller's own digest of its prompt.

        Args:
            blocks: numbers of the blocks, group by group, as the reference has them.

        Raises:
            Unproved: the reference is of another prompt, or of other blocks.
        """
        mine = replace(self.identity, digest=digest)
        if mine.proof(blocks) != self.proof:
            raise Unproved("reference", "the reference is not of this prompt, or not of its blocks")
        return replace(self, identity=mine)


def read_claim(params: Mapping[str, Any]) -> Claim:
    """Return the claim in transfer parameters, which may hold anything.

    Raises:
        Unproved: there is none, or it cannot be read.
    """
    found = params.get(PARAMS_KEY)
    try:
        if not isinstance(found, Mapping):
            raise TypeError("no identity")
        places = [(int(pp), int(tp), int(at)) for pp, tp, at in found["places"]]
        identity = Identity(
            incarnation=bytes.fromhex(found["incarnation"]),
            generation=int(found["generation"]),
            digest=bytes(ID_BYTES),
            tokens=int(found["tokens"]),
            checked=bool(found["checked"]),
        )
        proof = bytes.fromhex(found["proof"])
        if len(identity.incarnation) != ID_BYTES or len(proof) != ID_BYTES:
            raise ValueError("ids of a wrong length")
        if not 0 < len(places) <= _MAX_RANKS or min(at for *_, at in places) <= 0:
            raise ValueError("no place of a record")
        identity.record()
    except (KeyError, TypeError, ValueError, struct.error) as error:
        raise Unproved("unknown", f"the reference has no identity ({error})") from None
    return Claim(identity, {(pp, tp): at for pp, tp, at in places}, proof)
