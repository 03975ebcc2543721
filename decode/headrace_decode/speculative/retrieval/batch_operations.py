"""One engine step over many requests: drafts for all rows, or feedback on all rows, in one call.

All functions here are compiled loops over rows, so that a step pays the cost of Python once, and
not once a request. Handles that are not open are skipped: nothing is drafted or counted for them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace_decode.speculative.draft_batch import DraftBatch
from headrace_decode.speculative.jit import jit
from headrace_decode.speculative.retrieval.acceptance import MATCH_BUCKET, learn
from headrace_decode.speculative.retrieval.candidate_ranking import (
    COLUMNS,
    HANDLE,
    MATCH,
    MAX_CANDIDATES,
    MAX_PARTITION_CANDIDATES,
    OWN,
    ROW,
    SOURCE,
    TENANT,
    Scratch,
    find_candidates,
    rank_tokens,
)
from headrace_decode.speculative.retrieval.failure_table import (
    KEY_TOKENS,
    half_life_epoch,
    record_outcome,
)
from headrace_decode.speculative.retrieval.layout import ANCHORS, CONTEXT, LENGTHS, NONE
from headrace_decode.speculative.retrieval.ngram_index import hash_context, read_context
from headrace_decode.speculative.retrieval.ring_buffer import append_tokens

ROW_MASK = (1 << 20) - 1

_LONGEST = ANCHORS[-1]


class LookupSettings(NamedTuple):
    """The settings of a look-up for all its rows.

    Attributes:
        public: row of the public partition, or NONE.
        floor: minimum survival of a drafted token.
        now_s: time of time.time().
    """

    public: int
    floor: float
    now_s: float


def empty_drafts(handles: NDArray[np.int64], width: int) -> DraftBatch:
    """Return empty drafts of these requests, with room for `width` tokens each."""
    n = len(handles)
    lengths, source, match_tokens = np.zeros((3, n), np.int32)
    return DraftBatch(
        np.zeros((n, width), np.int32),
        np.zeros((n, width), np.float32),
        lengths,
        source,
        match_tokens,
        handles,
        np.zeros((n, width), np.int32),
        np.zeros((n, width), np.int64),
        np.full(n, NONE, np.int32),
        np.zeros(n, np.int64),
    )


@jit
def request_row(requests: Any, handle: int) -> int:
    """Return the row of an open request, or -1."""
    row = handle & ROW_MASK
    if handle <= 0 or row >= len(requests) or requests[row, HANDLE] != handle:
        return NONE
    return row


@jit
def extend_rows(store: Any, requests: Any, handles: Any, tokens: Any, counts: Any) -> None:
    """Append its tokens to each request; `tokens` has those of all rows one after the other."""
    start = 0
    for index in range(len(handles)):
        row = request_row(requests, handles[index])
        end = start + counts[index]
        if row != NONE and requests[row, OWN] != NONE:
            append_tokens(store.words, store.parts[requests[row, OWN]], tokens[start:end])
        start = end


@jit
def draft_rows(
    store: Any,
    requests: Any,
    effects: Any,
    parameters: Any,
    settings: Any,
    limits: Any,
    drafts: Any,
) -> None:
    """Draft at most `limits` [n] tokens for each row of `drafts`.

    Args:
        store: `layout.Store`.
        requests: the request table (`candidate_ranking`).
        effects: f8 [requests, EFFECT].
        parameters: `acceptance.AcceptanceParameters`.
        settings: `LookupSettings`.
        limits: int [n], maximum number of tokens of each row.
        drafts: `DraftBatch`, which is filled in.
    """
    context = np.empty(CONTEXT, np.int64)
    anchors, hashes = np.empty(_LONGEST, np.int64), np.empty(LENGTHS, np.int64)
    scratch = Scratch(
        np.empty((MAX_CANDIDATES, COLUMNS), np.int64),
        np.empty(MAX_CANDIDATES, np.float64),
        np.empty(MAX_CANDIDATES, np.int64),
        np.empty(MAX_CANDIDATES, np.int64),
        np.empty(MAX_CANDIDATES, np.float64),
        np.empty(KEY_TOKENS, np.int64),
        np.empty(COLUMNS, np.int64),
    )
    found, parts, epoch = scratch.found, store.parts, half_life_epoch(settings.now_s)
    for index in range(len(drafts.handles)):
        row = request_row(requests, drafts.handles[index])
        if row == NONE or limits[index] <= 0 or requests[row, OWN] == NONE:
            continue
        request = requests[row]
        own, tenant = request[OWN], request[TENANT]
        if parts[own].head == parts[own].tail:
            continue
        length = read_context(store.words, parts[own], context)
        hash_context(context, length, anchors, hashes)
        count = 0
        for part in (own, tenant, settings.public):
            if part != NONE:
                room = found[count : count + MAX_PARTITION_CANDIDATES]
                count += find_candidates(
                    store, part, context, length, hashes, request, settings.now_s, room
                )
        if count == 0:
            continue
        for which in range(count):
            match = MATCH_BUCKET[found[which, MATCH]]
            scratch.weights[which] = parameters.votes[found[which, SOURCE], match]
        for back in range(KEY_TOKENS):
            scratch.recent[back] = context[back] if back < length else NONE
        drafts.lengths[index] = rank_tokens(
            store,
            scratch,
            count,
            parameters,
            effects[row],
            tenant,
            epoch,
            settings.floor,
            min(limits[index], drafts.tokens.shape[1]),
            drafts,
            index,
        )
        if drafts.lengths[index]:
            lead = scratch.lead
            drafts.source[index], drafts.match_tokens[index] = lead[SOURCE], lead[MATCH]
            drafts.header_rows[index] = lead[ROW]
            if lead[ROW] != NONE:
                drafts.generations[index] = store.headers[lead[ROW]].generation


@jit
def feedback_rows(
    store: Any,
    requests: Any,
    effects: Any,
    parameters: Any,
    now_s: float,
    drafts: Any,
    offered: Any,
    accepted: Any,
) -> int:
    """Learn from the test of each row's draft; return the number of tested drafts.

    The accepted tokens and the first refused one go into the failure table of the request's
    tenant; the tokens after it were not tested.
    """
    epoch, verified, headers = half_life_epoch(now_s), 0, store.headers
    for index in range(len(drafts.handles)):
        tried = min(offered[index], drafts.lengths[index])
        good = min(accepted[index], tried)
        row = request_row(requests, drafts.handles[index])
        if tried <= 0 or good < 0 or row == NONE:
            continue
        verified += 1
        tenant = requests[row, TENANT]
        for at in range(min(good + 1, tried)):
            learn(parameters, effects[row], drafts.cells[index, at], at < good)
            if tenant != NONE:
                record_outcome(
                    store.words, store.parts[tenant], drafts.keys[index, at], at < good, epoch
                )
        header = drafts.header_rows[index]
        if header == NONE or headers[header].generation != drafts.generations[index]:
            continue
        if headers[header].partition == NONE:
            continue
        if good > 0:
            headers[header].accepted += 1
        else:
            headers[header].refused += 1
    return verified
