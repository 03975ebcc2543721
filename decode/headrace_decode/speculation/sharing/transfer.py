"""A memory's segments as records of a log, and back."""

from __future__ import annotations

import numpy as np

from headrace_decode.speculation.draft import Source
from headrace_decode.speculation.retrieval.draft_memory import PUBLIC_KEY, Key, Memory
from headrace_decode.speculation.retrieval.pool import LONGEST_SEGMENT_TOKENS, SegmentInfo
from headrace_decode.speculation.sharing.log_record import SegmentRecord


def record_of(memory: Memory, header: int) -> SegmentRecord:
    """A kept segment as a record. The caller holds the memory's lock."""
    fields = memory.pool.headers[header]
    corpus = memory.corpora.names[fields["corpus"]]
    return SegmentRecord(
        uid=int(fields["uid"]),
        created_s=float(fields["created_s"]),
        expires_s=float(fields["expires_s"]),
        version=int(fields["version"]),
        source=int(fields["source"]),
        corpus=str(corpus[2]) if isinstance(corpus, tuple) else "",
        model=_digest(memory.digests.names[fields["model"]]),
        tokenizer=_digest(memory.digests.names[fields["tokenizer"]]),
        tokens=memory.pool.tokens_of(header),
    )


def put_in(memory: Memory, key: Key, record: SegmentRecord, *, foreign: bool) -> int | None:
    """Insert a record's segment; its header row, or None if it is unfit, there is no room, or it is
    there already: corpora, and what is for all, reach a replica by more ways than one.

    Unfit is what no memory writes: negative tokens, other sources than corpora and answers,
    lengths out of bounds. The caller holds the memory's lock.
    """
    tokens = record.tokens
    if not 2 <= len(tokens) <= LONGEST_SEGMENT_TOKENS or int(tokens.min()) < 0:
        return None
    if record.source not in (Source.OPERATOR, Source.RESPONSE):
        return None
    if bool(record.corpus) != (record.source == Source.OPERATOR):
        return None
    if not memory.may_hold(key, record.source):
        return None
    if (record.corpus or key == PUBLIC_KEY) and is_there(memory, key, record.uid):
        return None
    return memory.pool.insert(
        key,
        np.ascontiguousarray(tokens, np.int32),
        SegmentInfo(
            source=record.source,
            created_s=record.created_s,
            expires_s=record.expires_s,
            model=memory.digest_number(record.model),
            tokenizer=memory.digest_number(record.tokenizer),
            corpus=memory.corpus_number(key, record.corpus) if record.corpus else 0,
            version=record.version,
            uid=record.uid,
            foreign=int(foreign),
        ),
    )


def is_there(memory: Memory, key: Key, uid: int) -> bool:
    """Whether a partition holds a segment. The caller holds the memory's lock."""
    headers = memory.pool.headers
    rows = np.flatnonzero(headers["uid"] == uid)
    return bool((headers["partition"][rows] == memory.pool.find(key)).any())


def _digest(name: object) -> bytes:
    return name if isinstance(name, bytes) else b""
