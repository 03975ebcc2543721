"""The drafting memory of one replica: open requests, what was kept of past ones, operator corpora.

Who may be drafted for whom is decided by where a text lies: a request is looked up in its own
partition, in its tenant's and in the public one, and there is no way from one tenant's partition to
another's. The public one holds only what the operator loaded for everybody and, if that is switched
on, what several tenants were answered alike (`anonymity`).

What tenants do share: the capacity (`pool` says who gives way), and what `acceptance` learns, which
is a few hundred numbers and no text.
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

from headrace_decode.speculation.draft import DraftBatch, Source
from headrace_decode.speculation.retrieval.acceptance import EFFECT, SOURCES, Acceptance
from headrace_decode.speculation.retrieval.anonymity import SharedWindows
from headrace_decode.speculation.retrieval.pool import LONGEST_SEGMENT_TOKENS, Pool, SegmentInfo
from headrace_decode.speculation.retrieval.retrieve import (
    HANDLE,
    MODEL,
    OWN,
    PROMPT_END,
    REQUEST_COLUMNS,
    TENANT,
    TOKENIZER,
)
from headrace_decode.speculation.retrieval.ring import append_run
from headrace_decode.speculation.retrieval.segments import NONE
from headrace_decode.speculation.retrieval.step import (
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
    """A kept partition: `tenant`'s, or with scope PUBLIC and tenant "" the public one."""

    scope: str
    tenant: str


PUBLIC_KEY = Key(PUBLIC, "")


def tenant_key(tenant: str) -> Key:
    """The partition of one tenant; "" is a tenant as any other."""
    return Key("tenant", tenant)


def corpus_key(tenant: str | None) -> Key:
    """Where a corpus for one tenant, or with None for all, lies."""
    return PUBLIC_KEY if tenant is None else tenant_key(tenant)


@dataclass(frozen=True)
class Settings:
    """What a memory may take and use.

    Attributes:
        capacity_bytes: for tokens, indexes and headers of everything, open requests included.
        model, tokenizer: digests, empty where all that is kept is of one kind. A segment is drafted
            only for the tokenizer that it was written with, and a response only for the model that
            gave it.
        response_ttl_s: how long an answer is kept at most.
        run_tokens: how many of its own last tokens a request is searched for.
        lead_tokens: how many tokens of its prompt an answer is kept with, so that its beginning
            can be found.
        floor: least survival that is drafted.
        failures, learns: whether refusals are remembered, and chances learned.
        sources: which texts are drafted from.
        for_all: whose texts may lie in the public partition: operator corpora, and of answers what
            several tenants have in common.
        shared_k: a window of tokens that so many tenants' answers contain is put there; None:
            nothing of answers is. Needs RESPONSE in `for_all`.
        replica: marks this replica's segments among those of others; random if 0, whatever seed
            the engine gave NumPy.
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
    """Small numbers for names, for tables that hold numbers only; 0 stands for none."""

    def __init__(self) -> None:
        self.names: list[Hashable] = [None]
        self._numbers: dict[Hashable, int] = {}

    def number(self, name: Hashable) -> int:
        """The name's number, new if need be; 0 when all 65535 are taken."""
        number = self._numbers.get(name)
        if number is None:
            if len(self.names) == 2**16:
                return 0
            number = self._numbers[name] = len(self.names)
            self.names.append(name)
        return number

    def find(self, name: Hashable) -> int:
        """The name's number, or 0."""
        return self._numbers.get(name, 0)


class Memory:
    """See the module's head; `draft.Drafter` has what the drafting methods mean.

    All methods may be called from any thread; each holds one lock for as long as it runs.
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
        """Called with each segment of no corpus that this replica put in, under the lock."""
        self.flipped: Callable[[Key, str, int], None] = lambda key, name, version: None
        """Called with each version of a corpus that this replica shares, when it takes over."""
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
        """Append accepted tokens: `tokens` of all rows in a line, `counts` [n] of each."""
        rows, sizes = np.asarray(handles, np.int64), np.asarray(counts, np.int64)
        with self.lock:
            self._grow(rows, sizes)
            extend_rows(self.pool.store, self._requests, rows, np.asarray(tokens, np.int32), sizes)

    def draft_many(self, handles: Sequence[int], max_tokens: int | NDArray[np.int32]) -> DraftBatch:
        """At most `max_tokens` tokens for each request, in the order of `handles`."""
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
        """The engine verified the first `offered_k` tokens of each draft and accepted `accepted_k`
        of those."""
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
        """Keep a sequence, in several segments if it is long; how many of its tokens were kept."""
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
        """Keep documents of a version of an operator's corpus, for one tenant or, with None, for
        all. They are drafted once `flip` has put that version in force.

        Returns:
            How many tokens were kept.

        Raises:
            ValueError: a version below 1, more than 65535 corpora, or for all where
                `Settings.for_all` has no corpora.
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
        """Put a corpus's version in force; at once no other is drafted. 0: none is. With `tell`,
        it is shared with other replicas."""
        key = corpus_key(tenant)
        with self.lock:
            self.pool.versions[self.corpus_number(key, name)] = version
            if tell:
                self.flipped(key, name, version)

    def may_hold(self, key: Key, source: int) -> bool:
        """Whether texts of this source may lie in a partition."""
        return key != PUBLIC_KEY or source in self.settings.for_all

    def stats(self) -> dict[str, float]:
        """Sizes now, and segments evicted since the start."""
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
        """No open request reads this partition any more."""
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
        """Let the own partitions of these requests have room for so many more tokens."""
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
        """What is kept of a request, and how many tokens of its prompt that begins with."""
        part = self.pool.parts[own]
        if part["head"] - prompt_end < 2:
            return None
        start = max(int(part["tail"]), prompt_end - self.settings.lead_tokens)
        return self.pool.run_tokens(own, start), max(prompt_end - start, 0)

    def digest_number(self, digest: bytes) -> int:
        """A digest's number; 0, which fits every request, for the empty one."""
        return self.digests.number(digest) if digest else 0

    def corpus_number(self, key: Key, name: str) -> int:
        """A corpus's number.

        Raises:
            ValueError: there are 65535 others.
        """
        number = self.corpora.number((key.scope, key.tenant, name))
        if number == 0:
            raise ValueError(f"corpus {name!r}: there have been 65535 others, the most that fit")
        return number

    def _next_uid(self) -> int:
        self._uids += 1
        return _uid(self.replica.to_bytes(8, "little"), self._uids.to_bytes(8, "little"))

    def _content_uid(self, key: Key, info: SegmentInfo, tokens: NDArray[np.int32]) -> int:
        """The same on every replica that puts in the same text."""
        names = (key, self.corpora.names[info.corpus], info.version, self.settings.model)
        return _uid(repr(names).encode(), tokens.astype("<i4").tobytes())


def _uid(*parts: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(b"".join(parts), digest_size=8).digest(), "little")
