"""The retrieval memory of one replica: open requests, past answers, and operator corpora.

The partition of a text decides for which requests it may be drafted. A request is looked up in its
own partition, in its tenant's and in the public one, and never in another tenant's. The public one
holds only corpora that the operator loaded for all tenants.

Tenants share the capacity (`partition_pool` decides which partition shrinks) and the parameters
that `acceptance` learns, which are a few hundred numbers and no text.
"""

from __future__ import annotations

import hashlib
import secrets
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from headrace_decode.speculative.draft_batch import DraftBatch, DraftSource
from headrace_decode.speculative.retrieval.acceptance import EFFECT, Acceptance
from headrace_decode.speculative.retrieval.batch_operations import (
    ROW_MASK,
    LookupSettings,
    draft_rows,
    empty_drafts,
    extend_rows,
    feedback_rows,
)
from headrace_decode.speculative.retrieval.candidate_ranking import (
    HANDLE,
    OWN,
    PROMPT_END,
    REQUEST_COLUMNS,
    TENANT,
)
from headrace_decode.speculative.retrieval.layout import NONE
from headrace_decode.speculative.retrieval.partition_pool import (
    MAX_SEGMENT_TOKENS,
    PartitionPool,
    SegmentInfo,
)
from headrace_decode.speculative.retrieval.ring_buffer import append_tokens

PUBLIC = "public"
"""`PartitionKey.scope` of the partition that every request may read."""


@dataclass(frozen=True)
class PartitionKey:
    """The key of a kept partition: that of `tenant`, or with scope PUBLIC and tenant "" the public
    one."""

    scope: str
    tenant: str


PUBLIC_KEY = PartitionKey(PUBLIC, "")


def tenant_key(tenant: str) -> PartitionKey:
    """Return the key of one tenant's partition; "" is a tenant like any other."""
    return PartitionKey("tenant", tenant)


def corpus_key(tenant: str | None) -> PartitionKey:
    """Return the key of the partition for corpora of one tenant, or of all tenants with None."""
    return PUBLIC_KEY if tenant is None else tenant_key(tenant)


@dataclass(frozen=True)
class MemorySettings:
    """The limits and settings of a memory.

    Attributes:
        capacity_bytes: capacity for all tokens, indexes and headers, including open requests.
        model, tokenizer: digests of the engine's; a corpus of another tokenizer and an answer of
            another model or tokenizer are not accepted from other replicas.
        response_ttl_s: maximum time for which an answer is kept.
        run_tokens: number of a request's own last tokens that are searched.
        lead_tokens: number of prompt tokens that are kept before an answer, so that its beginning
            can be found.
        floor: minimum survival of a drafted token.
        public_corpora: whether corpora for all tenants are allowed.
        replica: id of this replica in its segments; random if 0, regardless of the engine's seed
            for NumPy.
    """

    capacity_bytes: int = 256 << 20
    model: bytes = b""
    tokenizer: bytes = b""
    response_ttl_s: float = 86400.0
    run_tokens: int = 32768
    lead_tokens: int = 8
    floor: float = 0.02
    public_corpora: bool = True
    replica: int = 0


class Interner:
    """Small numbers for names, for tables that hold only numbers; 0 is for no name."""

    def __init__(self) -> None:
        self.names: list[Hashable] = [None]
        self._numbers: dict[Hashable, int] = {}

    def number(self, name: Hashable) -> int:
        """Return the name's number, a new one for a new name; 0 when all 65535 are taken."""
        number = self._numbers.get(name)
        if number is None:
            if len(self.names) == 2**16:
                return 0
            number = self._numbers[name] = len(self.names)
            self.names.append(name)
        return number

    def find(self, name: Hashable) -> int:
        """Return the name's number, or 0."""
        return self._numbers.get(name, 0)


class DraftMemory:
    """The retrieval memory of one replica.

    All methods may be called from any thread; those that read or change the memory's content hold
    one lock.
    """

    def __init__(
        self, settings: MemorySettings | None = None, clock: Callable[[], float] = time.time
    ) -> None:
        self.settings = settings = settings or MemorySettings()
        self.pool = PartitionPool(settings.capacity_bytes, self._on_drop)
        self.corpus_names = Interner()
        self.acceptance = Acceptance()
        self.replica = settings.replica or secrets.randbits(64)
        self.clock = clock
        self.lock = threading.RLock()
        self.on_insert: Callable[[PartitionKey, int], None] = lambda key, header: None
        """Function called under the lock with each segment that this replica inserted, except
        segments of corpora."""
        self.on_activate: Callable[[PartitionKey, str, int], None] = lambda key, name, version: None
        """Function called with each version of a corpus that this replica shares, when the version
        takes over."""
        self._uids = 0
        self._requests = np.zeros((64, REQUEST_COLUMNS), np.int64)
        self._effects = np.zeros((64, EFFECT))
        self._free_rows = list(range(63, -1, -1))
        self._opened = 0
        self._tenants: dict[int, str] = {}

    def open_request(
        self,
        request_id: str,
        prompt_tokens: NDArray[np.int32],
        tenant: str = "",
        *,
        temperature: float = 0.0,
    ) -> int:
        """Begin a request and index its prompt. `request_id` is for the caller's logs only."""
        prompt = np.asarray(prompt_tokens, np.int32)[-self.settings.run_tokens :]
        with self.lock:
            if not self._free_rows:
                self._add_request_rows()
            row = self._free_rows.pop()
            self._opened += 1
            handle = (self._opened << 20) | row
            own = self.pool.open_request_partition(min(len(prompt) + 256, self.settings.run_tokens))
            if own is not None:
                append_tokens(self.pool.arena.words, self.pool.parts[own], prompt)
            self.pool.touch(PUBLIC_KEY)
            stored = self.pool.get_or_create(tenant_key(tenant))
            fields = self._requests[row]
            fields[HANDLE] = handle
            fields[OWN] = NONE if own is None else own
            fields[TENANT] = NONE if stored is None else stored
            self._effects[row] = self.acceptance.initial_effect(temperature)
            fields[PROMPT_END] = len(prompt)
            self._tenants[row] = tenant
            return handle

    def extend_many(
        self, handles: Sequence[int], tokens: NDArray[np.int32], counts: NDArray[np.int32]
    ) -> None:
        """Append accepted tokens.

        Args:
            handles: the requests.
            tokens: the tokens of all requests, one after the other.
            counts: [n], number of tokens of each request.
        """
        rows, sizes = np.asarray(handles, np.int64), np.asarray(counts, np.int64)
        with self.lock:
            self._grow_requests(rows, sizes)
            extend_rows(self.pool.store, self._requests, rows, np.asarray(tokens, np.int32), sizes)

    def draft_many(self, handles: Sequence[int], max_tokens: int | NDArray[np.int32]) -> DraftBatch:
        """Draft at most `max_tokens` tokens for each request, in the order of `handles`."""
        rows = np.asarray(handles, np.int64)
        limits = np.empty(len(rows), np.int64)
        limits[:] = max_tokens
        drafts = empty_drafts(rows, max(int(limits.max(initial=0)), 0))
        with self.lock:
            public = self.pool.find(PUBLIC_KEY)
            public = NONE if public is None else public
            lookup = LookupSettings(public, self.settings.floor, self.clock())
            model = self.acceptance.parameters
            draft_rows(
                self.pool.store, self._requests, self._effects, model, lookup, limits, drafts
            )
        return drafts

    def feedback_many(
        self, batch: DraftBatch, offered_k: NDArray[np.int32], accepted_k: NDArray[np.int32]
    ) -> None:
        """Learn from the tests of drafts.

        Args:
            batch: the drafts.
            offered_k: number of tokens of each draft that were tested, from the first on.
            accepted_k: number of accepted tokens among them.
        """
        with self.lock:
            verified = feedback_rows(
                self.pool.store,
                self._requests,
                self._effects,
                self.acceptance.parameters,
                self.clock(),
                batch,
                np.asarray(offered_k, np.int64),
                np.asarray(accepted_k, np.int64),
            )
            if verified:
                self.acceptance.update_votes()

    def close_request(self, handle: int, *, keep: bool = True) -> None:
        """End a request; its answer goes into its tenant's memory if `keep`."""
        with self.lock:
            row = self._row(handle)
            if row is None:
                return
            fields = self._requests[row].copy()
            self._requests[row, HANDLE] = 0
            self._free_rows.append(row)
            tenant = self._tenants.pop(row)
            self.acceptance.on_request_end(self._effects[row])
            if fields[OWN] == NONE:
                return
            answer = (
                self._answer_tokens(int(fields[OWN]), int(fields[PROMPT_END])) if keep else None
            )
            self.pool.release(int(fields[OWN]))
            if answer is None:
                return
            now_s = self.clock()
            info = SegmentInfo(
                source=DraftSource.RESPONSE,
                created_s=now_s,
                expires_s=now_s + self.settings.response_ttl_s,
            )
            self.insert(tenant_key(tenant), answer, info)

    def insert(self, key: PartitionKey, tokens: NDArray[np.int32], info: SegmentInfo) -> int:
        """Keep a sequence, in several segments if it is long; return the number of kept tokens."""
        kept = 0
        with self.lock:
            for start in range(0, len(tokens), MAX_SEGMENT_TOKENS):
                piece = np.ascontiguousarray(tokens[start : start + MAX_SEGMENT_TOKENS], np.int32)
                if len(piece) < 2:
                    continue
                uid = self._content_uid(key, info, piece) if info.corpus else self._next_uid()
                header = self.pool.insert(key, piece, replace(info, uid=uid))
                if header is None:
                    continue
                kept += len(piece)
                if not info.corpus:
                    self.on_insert(key, header)
        return kept

    def add_to_corpus(
        self,
        name: str,
        version: int,
        sequences: Iterable[NDArray[np.int32]],
        *,
        tenant: str | None = None,
        ttl_s: float = float("inf"),
    ) -> int:
        """Keep documents of a version of an operator's corpus.

        The documents are drafted from after `activate_corpus` has put that version in force.

        Args:
            name: name of the corpus.
            version: the version.
            sequences: the documents.
            tenant: the tenant that they are for; None for all tenants.
            ttl_s: seconds until they expire.

        Returns:
            The number of tokens that were kept.

        Raises:
            ValueError: the version is not from 1 to 2^32 - 1, there are more than 65535 corpora, or
                `MemorySettings.public_corpora` does not allow corpora for all tenants.
        """
        if not 1 <= version < 2**32:
            raise ValueError(f"corpus {name!r} has version {version}; versions count from 1")
        key = corpus_key(tenant)
        if not self.allows_corpora(key):
            raise ValueError(f"corpus {name!r} is for all tenants, which is not allowed here")
        with self.lock:
            now_s = self.clock()
            info = SegmentInfo(
                source=DraftSource.OPERATOR,
                created_s=now_s,
                expires_s=now_s + ttl_s,
                corpus=self.corpus_number(key, name),
                version=version,
            )
        return sum(self.insert(key, np.asarray(each, np.int32), info) for each in sequences)

    def activate_corpus(
        self, name: str, version: int, *, tenant: str | None = None, replicate: bool = True
    ) -> None:
        """Put a corpus's version in force; from now on, no other version is drafted from.

        Args:
            name: name of the corpus.
            version: the version; 0 for none.
            tenant: the tenant that it is for; None for all tenants.
            replicate: whether the version is shared with other replicas.
        """
        key = corpus_key(tenant)
        with self.lock:
            self.pool.versions[self.corpus_number(key, name)] = version
            if replicate:
                self.on_activate(key, name, version)

    def allows_corpora(self, key: PartitionKey) -> bool:
        """Return whether a partition may hold corpora."""
        return key != PUBLIC_KEY or self.settings.public_corpora

    def stats(self) -> dict[str, float]:
        """Return the present sizes, and the number of segments evicted since the start."""
        with self.lock:
            keys = dict(self.pool.items())
            tokens = sum(
                int(self.pool.headers["tokens"][self.pool.segments(row)].sum())
                for row in keys.values()
            )
            return {
                "capacity_bytes": float(self.pool.capacity_bytes),
                "used_bytes": float(self.pool.used_bytes),
                "kept_tokens": float(tokens),
                "segments": float((self.pool.headers["partition"] != NONE).sum()),
                "partitions": float(len(keys)),
                "open_requests": float(len(self._tenants)),
                "evicted_segments": float(self.pool.evicted_segments),
            }

    def _on_drop(self, partition: int) -> None:
        """Remove this partition from all open requests."""
        self._requests[self._requests[:, TENANT] == partition, TENANT] = NONE

    def _row(self, handle: int) -> int | None:
        row = handle & ROW_MASK
        known = handle > 0 and row < len(self._requests)
        return row if known and self._requests[row, HANDLE] == handle else None

    def _add_request_rows(self) -> None:
        rows = len(self._requests)
        self._requests = np.concatenate([self._requests, np.zeros_like(self._requests)])
        self._effects = np.concatenate([self._effects, np.zeros_like(self._effects)])
        self._free_rows = list(range(2 * rows - 1, rows - 1, -1))

    def _grow_requests(self, handles: NDArray[np.int64], counts: NDArray[np.int64]) -> None:
        """Enlarge the requests' own partitions for so many more tokens."""
        rows = handles & ROW_MASK
        rows = np.where(rows < len(self._requests), rows, 0)
        own = self._requests[rows, OWN]
        parts = self.pool.parts[np.maximum(own, 0)]
        wanted = parts["head"] - parts["tail"] + counts
        short = (wanted > parts["capacity"]) & (parts["capacity"] < self.settings.run_tokens)
        for index in np.flatnonzero(short & (own != NONE)):
            if self._row(int(handles[index])) is not None:
                room = 2 * int(wanted[index])
                self.pool.grow(int(own[index]), min(room, self.settings.run_tokens))

    def _answer_tokens(self, own: int, prompt_end: int) -> NDArray[np.int32] | None:
        """Return the tokens to keep of a request; None if the answer has fewer than 2."""
        part = self.pool.parts[own]
        if part["head"] - prompt_end < 2:
            return None
        start = max(int(part["tail"]), prompt_end - self.settings.lead_tokens)
        return self.pool.request_tokens(own, start)

    def corpus_number(self, key: PartitionKey, name: str) -> int:
        """Return a corpus's number.

        Raises:
            ValueError: there are 65535 other corpora.
        """
        number = self.corpus_names.number((key.scope, key.tenant, name))
        if number == 0:
            raise ValueError(f"corpus {name!r}: there have been 65535 others, the most that fit")
        return number

    def _next_uid(self) -> int:
        self._uids += 1
        return _uid(self.replica.to_bytes(8, "little"), self._uids.to_bytes(8, "little"))

    def _content_uid(self, key: PartitionKey, info: SegmentInfo, tokens: NDArray[np.int32]) -> int:
        """Return the id of a segment that is the same on every replica that inserts its text."""
        names = (key, self.corpus_names.names[info.corpus], info.version, self.settings.model)
        return _uid(repr(names).encode(), tokens.astype("<i4").tobytes())


def _uid(*parts: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(b"".join(parts), digest_size=8).digest(), "little")
