"""Drafts the continuation of a context: finds candidates (`find`), and lets them vote (`walk`).

Coarse stage, for each partition: from the longest anchor to the shortest, walk the chain of the
k-gram in which the context ends, newest first. Compare tokens, since a hash proves nothing; that
extends the match backwards. Drop segments that are expired, of a superseded version or for another
model. Stop after the first anchor with survivors, or once enough have survived. The work is bounded
by constants, and not by the content of the partition.

Fine stage: the continuations of the few survivors share prefixes, so they form a trie, which is
never built. At each depth the candidates that agreed so far vote on the next token. A candidate's
vote has the odds of a lone candidate of its source and match length as its weight
(`acceptance.Learned.votes`). A token's votes are multiplied by (1 + accepted) / (1 + refused), by
its counts at this place (`refusals`). The token with the greatest weight is drafted, with its
probability (`acceptance`). The draft ends when no candidate continues, or survival falls below a
floor.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace_decode.speculative.draft import Source
from headrace_decode.speculative.jit import jit
from headrace_decode.speculative.retrieval.acceptance import (
    MATCH_BUCKET,
    POSITION_BUCKET,
    agreement_of,
    cell_of,
    chance,
    known_of,
)
from headrace_decode.speculative.retrieval.anchors import first_of, match_length, next_of, place
from headrace_decode.speculative.retrieval.refusals import KEY_TOKENS, evidence, key_of
from headrace_decode.speculative.retrieval.segments import (
    ANCHORS,
    GRANULE,
    LENGTHS,
    NONE,
    SEPARATOR,
)

SURVIVORS = 8
"""Maximum number of survivors in a partition."""
ENOUGH = (8, 8, 4, 3)
"""Number of survivors that suffice, by anchor length: places that share more with the context agree
more."""
HOPS = 2
"""Number of chain links followed for each wanted survivor."""
CANDIDATES = 3 * SURVIVORS
"""Maximum number of candidates in the request's own, its tenant's and the public partition."""

# Columns of a candidate, int64 [CANDIDATES, COLUMNS].
POSITION, PARTITION, MATCH, SOURCE, ROW, COLUMNS = range(6)

# Columns of the request table, int64 [requests, REQUEST_COLUMNS].
(
    HANDLE,  # the valid handle; 0 while the row is free
    OWN,  # its own partition
    TENANT,  # its tenant's partition, or NONE
    MODEL,
    TOKENIZER,
    PROMPT_END,  # position of the first answered token
    REQUEST_COLUMNS,
) = range(7)

_PROMPT, _OUTPUT = int(Source.PROMPT), int(Source.OUTPUT)
_LAST_POSITION = len(POSITION_BUCKET) - 1


@jit
def move(found: Any, which: int, to: int) -> None:
    """Copy a candidate to another row, by columns: assigning slices costs more than all else."""
    for column in range(COLUMNS):
        found[to, column] = found[which, column]


@jit
def usable(header: Any, versions: Any, model: int, tokenizer: int, now_s: float) -> bool:
    """Return whether a segment may be read for a request of this model and tokenizer.

    The segment must not be expired, and must be of its corpus's version in force.
    """
    if header.tokenizer != tokenizer or (header.model != 0 and header.model != model):
        return False
    current = header.corpus == 0 or header.version == versions[header.corpus]
    return current and header.expires_s > now_s


@jit
def find(
    store: Any,
    partition: int,
    context: Any,
    length: int,
    hashes: Any,
    request: Any,
    now_s: float,
    found: Any,
) -> int:
    """Find the survivors in the request's own partition, its tenant's or the public one.

    In the request's own partition, the last tokens are the context itself. It needs no hash: its
    last position links to the one before it in each of its chains.

    Args:
        store: `segments.Store`.
        partition: row of the partition.
        context, length: the last tokens of the request, newest first, and their number.
        hashes: hashes of the context (`anchors.hash_context`).
        request: row of the request table.
        now_s: time of time.time().
        found: i8 [survivors, COLUMNS], output.

    Returns:
        The number of survivors.
    """
    words, part, headers = store.words, store.parts[partition], store.headers
    own = partition == request[OWN]
    count = 0
    for which in range(LENGTHS - 1, -1, -1):
        if length < ANCHORS[which]:
            continue
        if own:
            position = next_of(words, part, part.head - 1, which)
        else:
            position = first_of(words, part, hashes, which)
        for _ in range(HOPS * ENOUGH[which]):
            if position < part.tail or count == ENOUGH[which]:
                break
            match = match_length(words, part, position, context, length)
            if match >= ANCHORS[which]:
                row, fits = NONE, True
                source = _PROMPT if position + 1 < request[PROMPT_END] else _OUTPUT
                if not own:
                    row = words[part.granules + place(part, position) // GRANULE]
                    fits = usable(
                        headers[row], store.versions, request[MODEL], request[TOKENIZER], now_s
                    )
                    source = headers[row].source
                if fits:
                    found[count, POSITION] = position
                    found[count, PARTITION] = partition
                    found[count, MATCH] = match
                    found[count, SOURCE] = source
                    found[count, ROW] = row
                    count += 1
            position = next_of(words, part, position, which)
        if count:
            break
    return count


class Scratch(NamedTuple):
    """The working arrays of a look-up.

    Attributes:
        found: i8 [CANDIDATES, COLUMNS], the candidates.
        weights: f8 [CANDIDATES], weights of their votes.
        upcoming, choices, votes: i8, i8 and f8 [CANDIDATES], next token of each candidate, the
            distinct next tokens, and their votes.
        recent: i8 [KEY_TOKENS], last tokens of the context, newest first.
        lead: i8 [COLUMNS], output: the candidate that the first token was mostly read from.
    """

    found: NDArray[np.int64]
    weights: NDArray[np.float64]
    upcoming: NDArray[np.int64]
    choices: NDArray[np.int64]
    votes: NDArray[np.float64]
    recent: NDArray[np.int64]
    lead: NDArray[np.int64]


@jit
def walk(
    store: Any,
    scratch: Any,
    count: int,
    known: Any,
    effect: Any,
    failing: int,
    epoch: int,
    floor: float,
    most: int,
    drafts: Any,
    row: int,
) -> int:
    """Draft the tokens with the greatest weight; return their number.

    Args:
        store: `segments.Store`.
        scratch: working arrays with `count` candidates and their weights. They are overwritten:
            candidates that disagree are removed. `recent` is overwritten, too.
        count: number of candidates.
        known: `acceptance.Learned`.
        effect: the request's effect (`acceptance`).
        failing: partition whose failure memory is used, or -1 for none.
        epoch: present epoch (`refusals.epoch_of`).
        floor: minimum survival of a drafted token.
        most: maximum number of tokens.
        drafts: `draft.DraftBatch`; tokens, survival, cells and keys of this `row` are the output.
        row: row of `drafts`.
    """
    words, parts = store.words, store.parts
    found, weights, recent = scratch.found, scratch.weights, scratch.recent
    upcoming, choices, votes = scratch.upcoming, scratch.choices, scratch.votes
    alive, survives = count, 1.0
    for depth in range(most):
        going = 0
        for which in range(alive):
            part = parts[found[which, PARTITION]]
            position = found[which, POSITION] + 1 + depth
            token = SEPARATOR
            if position < part.head:
                token = words[part.tokens + place(part, position)]
            if token != SEPARATOR:
                if going != which:
                    move(found, which, going)
                    weights[going] = weights[which]
                upcoming[going] = token
                going += 1
        if going == 0:
            return depth

        options = 0
        for which in range(going):
            option = 0
            while option < options and choices[option] != upcoming[which]:
                option += 1
            if option == options:
                choices[option], votes[option] = upcoming[which], 0.0
                options += 1
            votes[option] += weights[which]

        total, best, best_votes, best_past, best_key = 0.0, -1, -1.0, 0, 0
        for option in range(options):
            past, key, vote = 0, key_of(recent, choices[option]), votes[option]
            if failing >= 0:
                refused, accepted = evidence(words, parts[failing], key, epoch)
                vote *= (1.0 + accepted) / (1.0 + refused)
                past = known_of(refused, accepted)
            total += vote
            if vote > best_votes:
                best, best_votes, best_past, best_key = choices[option], vote, past, key

        alive, lead = 0, 0
        for which in range(going):
            if upcoming[which] == best:
                if alive != which:
                    move(found, which, alive)
                    weights[alive] = weights[which]
                if weights[alive] > weights[lead]:
                    lead = alive
                alive += 1
        if depth == 0:
            for column in range(COLUMNS):
                scratch.lead[column] = found[lead, column]
        cell = cell_of(
            found[lead, SOURCE],
            MATCH_BUCKET[found[lead, MATCH]],
            agreement_of(alive, best_votes / total),
            best_past,
            POSITION_BUCKET[min(depth, _LAST_POSITION)],
        )
        survives *= chance(known, effect, cell)
        if survives < floor:
            return depth
        drafts.tokens[row, depth], drafts.survival[row, depth] = best, survives
        drafts.cells[row, depth], drafts.keys[row, depth] = cell, best_key
        for back in range(KEY_TOKENS - 1, 0, -1):
            recent[back] = recent[back - 1]
        recent[0] = best
    return most
