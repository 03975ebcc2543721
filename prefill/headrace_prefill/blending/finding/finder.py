"""An index of the tokens of stored blocks, which finds runs of them in prompts, for each tenant."""

from __future__ import annotations

import hashlib
import secrets
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from headrace_prefill.blending.finding.anchors import LEAST, SPAN, anchors
from headrace_prefill.blending.finding.covering import covering
from headrace_prefill.blending.finding.matching import PLACE, matches
from headrace_prefill.blending.finding.table import CANDIDATES, Table, get, put
from headrace_prefill.blending.finding.texts import DIGEST_BYTES, Texts


@dataclass(frozen=True)
class Run:
    """Equal tokens, in the prompt and in stored blocks.

    Attributes:
        new: position of the first token in the prompt.
        old: position of the first token in the prompt that was stored.
        length: in tokens.
        blocks: digests of the stored blocks that hold it, in order.
        offset: position of the first token in the first block.
    """

    new: int
    old: int
    length: int
    blocks: tuple[bytes, ...]
    offset: int


class Finder:
    """An index of the texts of stored blocks.

    A run of `LEAST` tokens or more is found if one of the `CANDIDATES` latest places of one of its
    anchors lies in it. All methods take time linear in the number of tokens, and may be called from
    any thread.

    Args:
        capacity_tokens: maximum number of tokens kept; the oldest blocks are removed.
        block_tokens: tokens of a stored block.
    """

    def __init__(self, capacity_tokens: int, block_tokens: int) -> None:
        blocks = max(1, capacity_tokens // block_tokens)
        self._size = block_tokens
        self._texts = Texts.of(blocks, block_tokens)
        self._anchors = Table.of(blocks * block_tokens * 2 // (SPAN + 1))
        self._digests = Table.of(blocks)
        self._end = 0
        self._secret = secrets.token_bytes(16)
        self._lock = threading.Lock()

    @property
    def tokens(self) -> int:
        """Number of tokens in the index."""
        return (self._end - self._first) * self._size

    @property
    def nbytes(self) -> int:
        """Memory in bytes, allocated at the start."""
        arrays = *self._texts, *self._anchors, *self._digests
        return sum(array.nbytes for array in arrays)

    def add(self, tenant: str, tokens: ArrayLike, digests: Sequence[bytes]) -> None:
        """Keep a prompt's whole blocks.

        Args:
            tenant: the prompt's tenant; only prompts of the same tenant find it.
            tokens: [n], at least `block_tokens` for each digest.
            digests: digests of its blocks, from the first; each covers all tokens before it.

        Raises:
            ValueError: fewer tokens than the blocks have, or a digest of another length.
        """
        text = _tokens(tokens)
        if len(text) < len(digests) * self._size:
            raise ValueError(f"{len(text)} tokens for {len(digests)} blocks of {self._size}")
        if any(len(digest) != DIGEST_BYTES for digest in digests):
            raise ValueError(f"digests must have {DIGEST_BYTES} bytes")
        digests = digests[: len(self._texts.tokens)]
        whose = self._whose(tenant)
        with self._lock:
            known, previous = self._known(whose, digests)
            if known < len(digests):
                self._append(whose, text, digests, known, previous)

    def find(self, tenant: str, tokens: ArrayLike, least: int = LEAST) -> list[Run]:
        """Return runs of a prompt, or of a part of it, that stored blocks of the same tenant hold.

        Args:
            tenant: the prompt's tenant.
            tokens: [n].
            least: minimum length of a run in tokens.

        Returns:
            Runs, ascending, without overlap.
        """
        text = _tokens(tokens)
        whose = self._whose(tenant)
        ends, hashes = anchors(text, whose)
        found = np.empty((len(ends) * CANDIDATES, 3), np.int64)
        with self._lock:
            window = self._first, self._end
            count = matches(
                self._texts, self._anchors, text, np.uint64(whose), ends, hashes, *window, found
            )
            runs = found[:count]
            return [
                self._run(new, end, int(runs[row, PLACE]))
                for new, end, row in covering(runs, max(1, least))
            ]

    @property
    def _first(self) -> int:
        return max(0, self._end - len(self._texts.tokens))

    def _whose(self, tenant: str) -> int:
        hashed = hashlib.blake2b(tenant.encode(), digest_size=8, key=self._secret)
        return int.from_bytes(hashed.digest(), "little")

    def _blocks_of(self, digest: bytes) -> list[int]:
        """Return the blocks in the ring that have this digest, the latest first."""
        hashed, places = _digest_hash(digest), np.empty(CANDIDATES, np.int64)
        count = get(self._digests, hashed, self._first, places)
        stored = self._texts.digests
        wanted = np.frombuffer(digest, np.uint8)
        return [
            int(block) for block in places[:count] if (stored[block % len(stored)] == wanted).all()
        ]

    def _known(self, whose: int, digests: Sequence[bytes]) -> tuple[int, int]:
        """Return how many leading blocks are in the ring already, and the last one of them."""
        last = -1
        for number, digest in enumerate(digests):
            mine = [
                block
                for block in self._blocks_of(digest)
                if self._texts.tenant[block % len(self._texts.tenant)] == whose
                and self._texts.number[block % len(self._texts.number)] == number
            ]
            if not mine:
                return number, last
            last = mine[0]
        return len(digests), last

    def _append(
        self, whose: int, text: NDArray[np.int32], digests: Sequence[bytes], known: int, last: int
    ) -> None:
        begun, new = self._end, len(digests) - known
        at = (begun + np.arange(new)) % len(self._texts.tokens)
        size, texts = self._size, self._texts
        texts.tokens[at] = text[known * size : len(digests) * size].reshape(new, size)
        texts.previous[at] = np.concatenate([[last], begun + np.arange(new - 1)])
        texts.number[at] = known + np.arange(new)
        texts.tenant[at] = whose
        stored = np.frombuffer(b"".join(digests[known:]), np.uint8)
        texts.digests[at] = stored.reshape(new, DIGEST_BYTES)
        self._end += new
        hashed = np.array([_digest_hash(digest) for digest in digests[known:]], np.uint64)
        put(self._digests, hashed, begun + np.arange(new), self._first)
        # Windows that begin in known blocks and end in new ones are new.
        start = max(0, known * size - LEAST + 1)
        ends, hashes = anchors(text[start : len(digests) * size], whose)
        fresh = ends + start >= known * size
        places = ends[fresh] + start - known * size + begun * size
        put(self._anchors, hashes[fresh], places, self._first * size)

    def _run(self, new: int, end: int, last: int) -> Run:
        """Return the run that ends at place `last`, following its blocks backwards."""
        texts, length = self._texts, end - new
        blocks, block, left = [], last // self._size, length
        left -= last % self._size + 1
        blocks.append(block)
        while left > 0:
            block = int(texts.previous[block % len(texts.previous)])
            blocks.append(block)
            left -= self._size
        old = int(texts.number[block % len(texts.number)]) * self._size - left
        digests = [texts.digests[each % len(texts.digests)].tobytes() for each in reversed(blocks)]
        return Run(new, old, length, tuple(digests), -left)


def _tokens(tokens: ArrayLike) -> NDArray[np.int32]:
    text = np.ascontiguousarray(tokens, np.int32)
    if text.ndim != 1:
        raise ValueError(f"tokens of shape {text.shape}: must be [n]")
    return text


def _digest_hash(digest: bytes) -> np.uint64:
    return np.uint64(int.from_bytes(digest[:8], "little"))
