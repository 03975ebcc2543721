"""One engine step over many requests: drafts for all rows, or feedback on all rows, in one call.

Everything here is a compiled loop over rows, so that a step pays Python once, not once a request.
Handles that are not open are skipped: they draft nothing and count for nothing.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from headrace_decode.speculation.draft import Source
from headrace_decode.speculation.jit import jit
from headrace_decode.speculation.retrieval.acceptance import MATCH_BUCKET, learn
from headrace_decode.speculation.retrieval.anchors import hash_context, read_context
from headrace_decode.speculation.retrieval.refusals import KEY_TOKENS, epoch_of, witness
from headrace_decode.speculation.retrieval.retrieve import (
    CANDIDATES,
    COLUMNS,
    MATCH,
    ROW,
    SOURCE,
    SURVIVORS,
    find_kept,
    find_own,
    move,
)
from headrace_decode.speculation.retrieval.ring import append_run
from headrace_decode.speculation.retrieval.segments import (
    ANCHORS,
    CONTEXT,
    HEAD,
    LENGTHS,
    NONE,
    TAIL,
)
from headrace_decode.speculation.retrieval.trie import walk

# Columns of the request table, int64 [requests, REQUEST_COLUMNS].
(
    HANDLE,  # the handle that is good now; 0 while the row is free
    OWN,  # its own partition
    TENANT,  # its tenant's partition, or NONE
    MODEL,
    TOKENIZER,
    PROMPT_END,  # position of the first answered token
    REQUEST_COLUMNS,
) = range(7)
ROW_MASK = (1 << 20) - 1

_SURVIVORS, _NONE, _LONGEST = SURVIVORS, int(Source.NONE), ANCHORS[-1]


@jit
def request_row(requests: Any, handle: int) -> int:
    """Row of an open request, or -1."""
    row = handle & ROW_MASK
    if handle <= 0 or row >= len(requests) or requests[row, HANDLE] != handle:
        return NONE
    return row


@jit
def extend_rows(
    words: Any, parts: Any, requests: Any, handles: Any, tokens: Any, counts: Any
) -> None:
    """Append to each request its tokens; `tokens` of all rows lie one after the other."""
    start = 0
    for index in range(len(handles)):
        row = request_row(requests, handles[index])
        end = start + counts[index]
        if row != NONE and requests[row, OWN] != NONE:
            append_run(words, parts[requests[row, OWN]], tokens[start:end])
        start = end


@jit
def draft_rows(
    words: Any,
    parts: Any,
    headers: Any,
    versions: Any,
    requests: Any,
    public: int,
    votes: Any,
    weights: Any,
    sampling: Any,
    effects: Any,
    caution: float,
    allowed: Any,
    failing: bool,
    floor: float,
    now_s: float,
    handles: Any,
    most: Any,
    tokens: Any,
    survival: Any,
    lengths: Any,
    source: Any,
    match_tokens: Any,
    cells: Any,
    keys: Any,
    header_rows: Any,
    generations: Any,
) -> None:
    """Draft for each row; outputs are arrays over rows as in `draft.DraftBatch` and `Origin`.

    Args:
        public: row of the public partition, or NONE.
        allowed: bool [sources], which may be read.
        votes, weights, sampling, caution: as in `acceptance.Acceptance`.
        effects: f8 [requests, EFFECT].
        failing: whether failure memories are asked.
        floor: least survival that is drafted.
    """
    context = np.empty(CONTEXT, np.int64)
    scratch, hashes = np.empty(_LONGEST, np.int64), np.empty(LENGTHS, np.int64)
    recent = np.empty(KEY_TOKENS, np.int64)
    found = np.empty((CANDIDATES, COLUMNS), np.int64)
    counts = np.empty(CANDIDATES, np.float64)
    upcoming, choices = np.empty(CANDIDATES, np.int64), np.empty(CANDIDATES, np.int64)
    ballots = np.empty(CANDIDATES, np.float64)
    origin = np.empty(COLUMNS, np.int64)
    epoch = epoch_of(now_s)
    for index in range(len(handles)):
        lengths[index], source[index], match_tokens[index] = 0, _NONE, 0
        header_rows[index] = NONE
        row = request_row(requests, handles[index])
        if row == NONE or most[index] <= 0 or requests[row, OWN] == NONE:
            continue
        request = requests[row]
        own, tenant = request[OWN], request[TENANT]
        if parts[own, HEAD] == parts[own, TAIL]:
            continue
        length = read_context(words, parts[own], context)
        count = find_own(words, parts[own], own, context, length, request[PROMPT_END], found)
        hash_context(context, length, scratch, hashes)
        for kept in (tenant, public):
            if kept != NONE:
                count += find_kept(
                    words,
                    parts[kept],
                    kept,
                    context,
                    length,
                    hashes,
                    headers,
                    versions,
                    request[MODEL],
                    request[TOKENIZER],
                    now_s,
                    found[count : count + _SURVIVORS],
                )
        going = 0
        for which in range(count):
            if allowed[found[which, SOURCE]]:
                if going != which:
                    move(found, which, going)
                counts[going] = votes[found[going, SOURCE], MATCH_BUCKET[found[going, MATCH]]]
                going += 1
        if going == 0:
            continue
        for back in range(KEY_TOKENS):
            recent[back] = context[back] if back < length else NONE
        lengths[index] = walk(
            words,
            parts,
            found,
            counts,
            going,
            recent,
            tenant if failing else NONE,
            epoch,
            weights,
            sampling,
            effects[row],
            caution,
            floor,
            min(most[index], tokens.shape[1]),
            tokens[index],
            survival[index],
            cells[index],
            keys[index],
            upcoming,
            choices,
            ballots,
            origin,
        )
        if lengths[index]:
            source[index], match_tokens[index] = origin[SOURCE], origin[MATCH]
            header_rows[index] = origin[ROW]
            if origin[ROW] != NONE:
                generations[index] = headers[origin[ROW]].generation


@jit
def feedback_rows(
    words: Any,
    parts: Any,
    headers: Any,
    requests: Any,
    weights: Any,
    sampling: Any,
    effects: Any,
    learns: bool,
    now_s: float,
    handles: Any,
    lengths: Any,
    offered: Any,
    accepted: Any,
    cells: Any,
    keys: Any,
    header_rows: Any,
    generations: Any,
) -> int:
    """Learn from what the engine did with each row's draft; how many rows were verified.

    The failure memory of the request's tenant hears of the accepted tokens and of the first refused
    one; those behind it were not tried.
    """
    epoch, verified = epoch_of(now_s), 0
    for index in range(len(handles)):
        tried = min(offered[index], lengths[index])
        good = min(accepted[index], tried)
        row = request_row(requests, handles[index])
        if tried <= 0 or good < 0 or row == NONE:
            continue
        verified += 1
        for position in range(min(good + 1, tried) if learns else 0):
            learn(weights, sampling, effects[row], cells[index, position], position < good)
        tenant = requests[row, TENANT]
        if tenant != NONE:
            for position in range(min(good + 1, tried)):
                witness(words, parts[tenant], keys[index, position], position < good, epoch)
        header = header_rows[index]
        if header == NONE or headers[header].generation != generations[index]:
            continue
        if headers[header].partition == NONE:
            continue
        if good > 0:
            headers[header].accepted += 1
            headers[header].used = 1
        else:
            headers[header].refused += 1
    return verified
