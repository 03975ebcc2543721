"""One engine step over many requests: drafts for all rows, or feedback on all rows, in one call.

All functions here are compiled loops over rows, so that a step pays the cost of Python once, and
not once a request. Handles that are not open are skipped: nothing is drafted or counted for them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace_decode.speculative.draft import DraftBatch
from headrace_decode.speculative.jit import jit
from headrace_decode.speculative.retrieval.acceptance import MATCH_BUCKET, learn
from headrace_decode.speculative.retrieval.anchors import hash_context, read_context
from headrace_decode.speculative.retrieval.refusals import KEY_TOKENS, epoch_of, witness
from headrace_decode.speculative.retrieval.retrieve import (
    CANDIDATES,
    COLUMNS,
    HANDLE,
    MATCH,
    OWN,
    ROW,
    SOURCE,
    SURVIVORS,
    TENANT,
    Scratch,
    find,
    move,
    walk,
)
from headrace_decode.speculative.retrieval.ring import append_run
from headrace_decode.speculative.retrieval.segments import ANCHORS, CONTEXT, LENGTHS, NONE

ROW_MASK = (1 << 20) - 1

_SURVIVORS, _LONGEST = SURVIVORS, ANCHORS[-1]


class Look(NamedTuple):
    """The settings of a look-up for all its rows.

    Attributes:
        public: row of the public partition, or NONE.
        allowed: bool [sources], whether each source may be read.
        failing: whether failure memories are used.
        floor: minimum survival of a drafted token.
        now_s: time of time.time().
    """

    public: int
    allowed: NDArray[np.bool_]
    failing: bool
    floor: float
    now_s: float


def no_drafts(handles: NDArray[np.int64], width: int) -> DraftBatch:
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
            append_run(store.words, store.parts[requests[row, OWN]], tokens[start:end])
        start = end


@jit
def draft_rows(
    store: Any, requests: Any, effects: Any, known: Any, look: Any, most: Any, drafts: Any
) -> None:
    """Draft at most `most` [n] tokens for each row of `drafts`.

    Args:
        store: `segments.Store`.
        requests: the request table (`retrieve`).
        effects: f8 [requests, EFFECT].
        known: `acceptance.Learned`.
        look: `Look`.
        most: int [n], maximum number of tokens of each row.
        drafts: `draft.DraftBatch`, which is filled in.
    """
    context = np.empty(CONTEXT, np.int64)
    anchors, hashes = np.empty(_LONGEST, np.int64), np.empty(LENGTHS, np.int64)
    scratch = Scratch(
        np.empty((CANDIDATES, COLUMNS), np.int64),
        np.empty(CANDIDATES, np.float64),
        np.empty(CANDIDATES, np.int64),
        np.empty(CANDIDATES, np.int64),
        np.empty(CANDIDATES, np.float64),
        np.empty(KEY_TOKENS, np.int64),
        np.empty(COLUMNS, np.int64),
    )
    found, parts, epoch = scratch.found, store.parts, epoch_of(look.now_s)
    for index in range(len(drafts.handles)):
        row = request_row(requests, drafts.handles[index])
        if row == NONE or most[index] <= 0 or requests[row, OWN] == NONE:
            continue
        request = requests[row]
        own, tenant = request[OWN], request[TENANT]
        if parts[own].head == parts[own].tail:
            continue
        length = read_context(store.words, parts[own], context)
        hash_context(context, length, anchors, hashes)
        count = going = 0
        for part in (own, tenant, look.public):
            if part != NONE:
                room = found[count : count + _SURVIVORS]
                count += find(store, part, context, length, hashes, request, look.now_s, room)
        for which in range(count):
            if look.allowed[found[which, SOURCE]]:
                if going != which:
                    move(found, which, going)
                match = MATCH_BUCKET[found[going, MATCH]]
                scratch.weights[going] = known.votes[found[going, SOURCE], match]
                going += 1
        if going == 0:
            continue
        for back in range(KEY_TOKENS):
            scratch.recent[back] = context[back] if back < length else NONE
        drafts.lengths[index] = walk(
            store,
            scratch,
            going,
            known,
            effects[row],
            tenant if look.failing else NONE,
            epoch,
            look.floor,
            min(most[index], drafts.tokens.shape[1]),
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
    known: Any,
    learns: bool,
    now_s: float,
    drafts: Any,
    offered: Any,
    accepted: Any,
) -> int:
    """Learn from the engine's verdict on each row's draft; return the number of rows with one.

    The accepted tokens and the first refused one go into the failure memory of the request's
    tenant; the tokens after it were not tested.
    """
    epoch, verified, headers = epoch_of(now_s), 0, store.headers
    for index in range(len(drafts.handles)):
        tried = min(offered[index], drafts.lengths[index])
        good = min(accepted[index], tried)
        row = request_row(requests, drafts.handles[index])
        if tried <= 0 or good < 0 or row == NONE:
            continue
        verified += 1
        tenant = requests[row, TENANT]
        for at in range(min(good + 1, tried)):
            if learns:
                learn(known, effects[row], drafts.cells[index, at], at < good)
            if tenant != NONE:
                witness(store.words, store.parts[tenant], drafts.keys[index, at], at < good, epoch)
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
