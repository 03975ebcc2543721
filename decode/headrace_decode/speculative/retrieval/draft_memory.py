"""The drafting memory of one replica: open requests, answers of past ones, and operator corpora.

The partition of a text decides for which requests it may be drafted. A request is looked up in its
own partition, in its tenant's and in the public one, and never in another tenant's. The public one
holds only corpora that the operator loaded for all tenants and, if that is switched on, text that
the answers of several tenants have in common (`anonymity`).

Tenants share the capacity (`pool` decides which partition shrinks) and the parameters that
`acceptance` learns, which are a few hundred numbers and no text.
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

from headrace_decode.speculative.draft import DraftBatch, Source
from headrace_decode.speculative.retrieval.acceptance import EFFECT, SOURCES, Acceptance
from headrace_decode.speculative.retrieval.anonymity import SharedWindows
from headrace_decode.speculative.retrieval.pool import LONGEST_SEGMENT_TOKENS, Pool, SegmentInfo
from headrace_decode.speculative.retrieval.retrieve import (
    HANDLE,
    MODEL,
    OWN,
    PROMPT_END,
    REQUEST_COLUMNS,
    TENANT,
    TOKENIZER,
)
from headrace_decode.speculative.retrieval.ring import append_run
from headrace_decode.speculative.retrieval.segments import NONE
from headrace_decode.speculative.retrieval.step import (
    ROW_MASK,
    Look,
    draft_rows,
    extend_rows,
    feedback_rows,
    no_drafts,
)

PUBLIC = "public"
"""`Key.scope` of the partition that every request may read."""
ALL_SOURCES = frozenset(Source) - {Source.NONE}
OWN_TEXT = frozenset({Source.PROMPT, Source.OUTPUT})


@dataclass(frozen=True)
class Key:
    """The key of a kept partition: that of `tenant`, or with scope PUBLIC and tenant "" the public
    one."""

    scope: str
    tenant: str


PUBLIC_KEY = Key(PUBLIC, "")


def tenant_key(tenant: str) -> Key:
    """Return the key of one tenant's partition; "" is a tenant like any other."""
    return Key("tenant", tenant)


def corpus_key(tenant: str | None) -> Key:
    """Return the key of the partition for corpora of one tenant, or of all tenants with None."""
    return PUBLIC_KEY if tenant is None else tenant_key(tenant)


@dataclass(frozen=True)
class Settings:
    """The limits and settings of a memory.

    Attributes:
        capacity_bytes: capacity for all tokens, indexes and headers, including open requests.
        model, tokenizer: digests; empty if all text is of one model and tokenizer. A segment is
            drafted only for the tokenizer that it was written with, and a response only for the
            model that gave it.
        response_ttl_s: maximum time for which an answer is kept.
        run_tokens: number of a request's own last tokens that are searched.
        lead_tokens: number of prompt tokens that are kept before an answer, so that its beginning
            can be found.
        floor: minimum survival of a drafted token.
        failures, learns: whether refusals are remembered, and acceptance is learned.
        sources: the sources that are drafted from.
        for_all: the sources whose texts may be in the public partition: operator corpora, and text
            that the answers of several tenants have in common.
        shared_k: number of tenants whose answers must contain a window of tokens before it is put
            into the public partition; None: no text of answers is. Needs RESPONSE in `for_all`.
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
    failures: bool = True
    learns: bool = True
    sources: frozenset[Source] = ALL_SOURCES
    for_all: frozenset[Source] = frozenset({Source.OPERATOR})
    shared_k: int | None = None
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


class Memory:
    """The drafting memory of one replica.

    All methods may be called from any thread; those that read or change the memory's content hold
    one lock.
    """

    def __init__(
        self, settings: Settings | None = None, clock: Callable[[], float] = time.time
    ) -> None:
        self.settings = settings = settings or Settings()
        self.pool = Pool(settings.capacity_bytes, self._unlink)
        self.digests, self.corpora = Interner(), Interner()
        self.acceptance = Acceptance()
        self.replica = settings.replica or secrets.randbits(64)
        self._shared = SharedWindows(settings.shared_k) if settings.shared_k else None
        self.clock = clock
        self.lock = threading.RLock()
        self.inserted: Callable[[Key, int], None] = lambda key, header: None
        """Function called under the lock with each segment that this replica inserted, except
        segments of corpora."""
        self.flipped: Callable[[Key, str, int], None] = lambda key, name, version: None
        """Function called with each version of a corpus that this replica shares, when the version
        takes over."""
        self._uids = 0
        self._model = self.digest_number(settings.model)
        self._tokenizer = self.digest_number(settings.tokenizer)
        self._allowed = np.array([source in settings.sources for source in range(SOURCES)])
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
                self._more_rows()
            row = self._free_rows.pop()
            self._opened += 1
            handle = (self._opened << 20) | row
            own = self.pool.open_run(min(len(prompt) + 256, self.settings.run_tokens))
            if own is not None:
                append_run(self.pool.arena.words, self.pool.parts[own], prompt)
            self.pool.use(PUBLIC_KEY)
            kept = self.pool.keep(tenant_key(tenant))
            fields = self._requests[row]
            fields[HANDLE] = handle
            fields[OWN] = NONE if own is None else own
            fields[TENANT] = NONE if kept is None else kept
            fields[MODEL], fields[TOKENIZER] = self._model, self._tokenizer
            self._effects[row] = self.acceptance.effect(temperature)
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
            self._grow(rows, sizes)
            extend_rows(self.pool.store, self._requests, rows, np.asarray(tokens, np.int32), sizes)

    def draft_many(self, handles: Sequence[int], max_tokens: int | NDArray[np.int32]) -> DraftBatch:
        """Draft at most `max_tokens` tokens for each request, in the order of `handles`."""
        asked = np.asarray(handles, np.int64)
        most = np.empty(len(asked), np.int64)
        most[:] = max_tokens
        drafts = no_drafts(asked, max(int(most.max(initial=0)), 0))
        with self.lock:
            public, settings = self.pool.find(PUBLIC_KEY), self.settings
            look = Look(
                NONE if public is None else public,
                self._allowed,
                settings.failures,
                settings.floor,
                self.clock(),
            )
            known = self.acceptance.known
            draft_rows(self.pool.store, self._requests, self._effects, known, look, most, drafts)
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
                self.acceptance.known,
                self.settings.learns,
                self.clock(),
                batch,
                np.asarray(offered_k, np.int64),
                np.asarray(accepted_k, np.int64),
            )
            if verified and self.settings.learns:
                self.acceptance.learned()

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
            if self.settings.learns:
                self.acceptance.ended(self._effects[row])
            if fields[OWN] == NONE:
                return
            answer = self._answer(int(fields[OWN]), int(fields[PROMPT_END])) if keep else None
            self.pool.close_run(int(fields[OWN]))
            if answer is None:
                return
            tokens, asked_tokens = answer
            now_s = self.clock()
            info = SegmentInfo(
                source=Source.RESPONSE,
                created_s=now_s,
                expires_s=now_s + self.settings.response_ttl_s,
                model=self._model,
                tokenizer=self._tokenizer,
            )
            self.insert(tenant_key(tenant), tokens, info)
            if self._shared is not None:
                for window in self._shared.observe(tenant, tokens[asked_tokens:]):
                    self.insert(PUBLIC_KEY, window, info)

    def insert(self, key: Key, tokens: NDArray[np.int32], info: SegmentInfo) -> int:
        """Keep a sequence, in several segments if it is long; return the number of kept tokens."""
        kept = 0
        with self.lock:
            for start in range(0, len(tokens), LONGEST_SEGMENT_TOKENS):
                piece = np.ascontiguousarray(
                    tokens[start : start + LONGEST_SEGMENT_TOKENS], np.int32
                )
                if len(piece) < 2:
                    continue
                same = info.corpus or key == PUBLIC_KEY
                uid = self._content_uid(key, info, piece) if same else self._next_uid()
                header = self.pool.insert(key, piece, replace(info, uid=uid))
                if header is None:
                    continue
                kept += len(piece)
                if not info.corpus:
                    self.inserted(key, header)
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

        The documents are drafted from after `flip` has put that version in force.

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
                `Settings.for_all` does not allow corpora for all tenants.
        """
        if not 1 <= version < 2**32:
            raise ValueError(f"corpus {name!r} has version {version}; versions count from 1")
        key = corpus_key(tenant)
        if not self.may_hold(key, Source.OPERATOR):
            raise ValueError(f"corpus {name!r} is for all tenants, which is not allowed here")
        with self.lock:
            now_s = self.clock()
            info = SegmentInfo(
                source=Source.OPERATOR,
                created_s=now_s,
                expires_s=now_s + ttl_s,
                tokenizer=self._tokenizer,
                corpus=self.corpus_number(key, name),
                version=version,
            )
        return sum(self.insert(key, np.asarray(each, np.int32), info) for each in sequences)

    def flip(
        self, name: str, version: int, *, tenant: str | None = None, tell: bool = True
    ) -> None:
        """Put a corpus's version in force; from now on, no other version is drafted from.

        Args:
            name: name of the corpus.
            version: the version; 0 for none.
            tenant: the tenant that it is for; None for all tenants.
            tell: whether the version is shared with other replicas.
        """
        key = corpus_key(tenant)
        with self.lock:
            self.pool.versions[self.corpus_number(key, name)] = version
            if tell:
                self.flipped(key, name, version)

    def may_hold(self, key: Key, source: int) -> bool:
        """Return whether a partition may hold texts of this source."""
        return key != PUBLIC_KEY or source in self.settings.for_all

    def stats(self) -> dict[str, float]:
        """Return the present sizes, and the number of segments evicted since the start."""
        with self.lock:
            keys = dict(self.pool.kept())
            held = sum(
                int(self.pool.headers["tokens"][self.pool.segments(row)].sum())
                for row in keys.values()
            )
            return {
                "capacity_bytes": float(self.pool.capacity_bytes),
                "used_bytes": float(self.pool.used_bytes),
                "kept_tokens": float(held),
                "segments": float((self.pool.headers["partition"] != NONE).sum()),
                "partitions": float(len(keys)),
                "open_requests": float(len(self._tenants)),
                "evicted_segments": float(self.pool.evicted_segments),
            }

    def _unlink(self, kept: int) -> None:
        """Remove this partition from all open requests."""
        self._requests[self._requests[:, TENANT] == kept, TENANT] = NONE

    def _row(self, handle: int) -> int | None:
        row = handle & ROW_MASK
        known = handle > 0 and row < len(self._requests)
        return row if known and self._requests[row, HANDLE] == handle else None

    def _more_rows(self) -> None:
        rows = len(self._requests)
        self._requests = np.concatenate([self._requests, np.zeros_like(self._requests)])
        self._effects = np.concatenate([self._effects, np.zeros_like(self._effects)])
        self._free_rows = list(range(2 * rows - 1, rows - 1, -1))

    def _grow(self, handles: NDArray[np.int64], counts: NDArray[np.int64]) -> None:
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
                self.pool.widen(int(own[index]), min(room, self.settings.run_tokens))

    def _answer(self, own: int, prompt_end: int) -> tuple[NDArray[np.int32], int] | None:
        """Return the tokens to keep of a request, and the number of prompt tokens at their start.

        Return None if the answer has fewer than 2 tokens.
        """
        part = self.pool.parts[own]
        if part["head"] - prompt_end < 2:
            return None
        start = max(int(part["tail"]), prompt_end - self.settings.lead_tokens)
        return self.pool.run_tokens(own, start), max(prompt_end - start, 0)

    def digest_number(self, digest: bytes) -> int:
        """Return a digest's number; 0 for the empty digest."""
        return self.digests.number(digest) if digest else 0

    def corpus_number(self, key: Key, name: str) -> int:
        """Return a corpus's number.

        Raises:
            ValueError: there are 65535 other corpora.
        """
        number = self.corpora.number((key.scope, key.tenant, name))
        if number == 0:
            raise ValueError(f"corpus {name!r}: there have been 65535 others, the most that fit")
        return number

    def _next_uid(self) -> int:
        self._uids += 1
        return _uid(self.replica.to_bytes(8, "little"), self._uids.to_bytes(8, "little"))

    def _content_uid(self, key: Key, info: SegmentInfo, tokens: NDArray[np.int32]) -> int:
        """Return the id of a segment that is the same on every replica that inserts its text."""
        names = (key, self.corpora.names[info.corpus], info.version, self.settings.model)
        return _uid(repr(names).encode(), tokens.astype("<i4").tobytes())


def _uid(*parts: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(b"".join(parts), digest_size=8).digest(), "little")
