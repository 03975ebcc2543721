"""Coarse-to-fine ranking: finds candidates (`find_candidates`), and lets them vote (`rank_tokens`).

Coarse stage, for each partition: from the longest anchor to the shortest, follow the chain of the
k-gram in which the context ends, newest first. Compare tokens, since a hash proves nothing; that
extends the match backwards. Drop segments that are expired or of a superseded version. Stop after
the first anchor with candidates, or once there are enough. The work is bounded by constants, and
not by the content of the partition.

Fine stage: the continuations of the few candidates share prefixes, so they form a trie, which is
never built. At each depth the candidates that agreed so far vote on the next token. The weight of a
candidate's vote is the odds of a lone candidate of its source and match length
(`AcceptanceParameters.votes`). A token's votes are multiplied by (1 + accepted) / (1 + refused), by
its counts at this place (`failure_table`). The token with the greatest weight is drafted, with its
probability (`acceptance`). The draft ends when no candidate continues, or survival falls below a
floor.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace_decode.speculative.draft_batch import DraftSource
from headrace_decode.speculative.jit import jit
from headrace_decode.speculative.retrieval.acceptance import (
    MATCH_BUCKET,
    POSITION_BUCKET,
    acceptance_probability,
    agreement_bucket,
    encode_features,
    failure_bucket,
)
from headrace_decode.speculative.retrieval.failure_table import (
    KEY_TOKENS,
    failure_key,
    outcome_counts,
)
from headrace_decode.speculative.retrieval.layout import (
    ANCHORS,
    GRANULE,
    LENGTHS,
    NONE,
    SEPARATOR,
)
from headrace_decode.speculative.retrieval.ngram_index import (
    match_length,
    newest_position,
    older_position,
    ring_offset,
)

MAX_PARTITION_CANDIDATES = 8
"""Maximum number of candidates in a partition."""
ENOUGH_CANDIDATES = (8, 8, 4, 3)
"""Number of candidates that suffice, by anchor length: places that share more with the context
agree more."""
LINKS_PER_CANDIDATE = 2
"""Number of chain links followed for each wanted candidate."""
MAX_CANDIDATES = 3 * MAX_PARTITION_CANDIDATES
"""Maximum number of candidates in the request's own, its tenant's and the public partition."""

# Columns of a candidate, int64 [MAX_CANDIDATES, COLUMNS].
POSITION, PARTITION, MATCH, SOURCE, ROW, COLUMNS = range(6)

# Columns of the request table, int64 [requests, REQUEST_COLUMNS].
(
    HANDLE,  # the valid handle; 0 while the row is free
    OWN,  # its own partition
    TENANT,  # its tenant's partition, or NONE
    PROMPT_END,  # position of the first answered token
    REQUEST_COLUMNS,
) = range(5)

_PROMPT, _OUTPUT = int(DraftSource.PROMPT), int(DraftSource.OUTPUT)
_LAST_POSITION = len(POSITION_BUCKET) - 1


@jit
def copy_candidate(found: Any, which: int, to: int) -> None:
    """Copy a candidate to another row, by columns: assigning slices costs more than all else."""
    for column in range(COLUMNS):
        found[to, column] = found[which, column]


@jit
def is_usable(header: Any, versions: Any, now_s: float) -> bool:
    """Return whether a segment is not expired, and of its corpus's version in force."""
    current = header.corpus == 0 or header.version == versions[header.corpus]
    return current and header.expires_s > now_s


@jit
def find_candidates(
    store: Any,
    partition: int,
    context: Any,
    length: int,
    hashes: Any,
    request: Any,
    now_s: float,
    found: Any,
) -> int:
    """Find the candidates in the request's own partition, its tenant's or the public one.

    In the request's own partition, the last tokens are the context itself. It needs no hash: its
    last position links to the one before it in each of its chains.

    Args:
        store: `layout.Store`.
        partition: row of the partition.
        context, length: the last tokens of the request, newest first, and their number.
        hashes: hashes of the context (`ngram_index.hash_context`).
        request: row of the request table.
        now_s: time of time.time().
        found: i8 [candidates, COLUMNS], output.

    Returns:
        The number of candidates.
    """
    words, part, headers = store.words, store.parts[partition], store.headers
    own = partition == request[OWN]
    count = 0
    for which in range(LENGTHS - 1, -1, -1):
        if length < ANCHORS[which]:
            continue
        if own:
            position = older_position(words, part, part.head - 1, which)
        else:
            position = newest_position(words, part, hashes, which)
        for _ in range(LINKS_PER_CANDIDATE * ENOUGH_CANDIDATES[which]):
            if position < part.tail or count == ENOUGH_CANDIDATES[which]:
                break
            match = match_length(words, part, position, context, length)
            if match >= ANCHORS[which]:
                row, fits = NONE, True
                source = _PROMPT if position + 1 < request[PROMPT_END] else _OUTPUT
                if not own:
                    row = words[part.granules + ring_offset(part, position) // GRANULE]
                    fits = is_usable(headers[row], store.versions, now_s)
                    source = headers[row].source
                if fits:
                    found[count, POSITION] = position
                    found[count, PARTITION] = partition
                    found[count, MATCH] = match
                    found[count, SOURCE] = source
                    found[count, ROW] = row
                    count += 1
            position = older_position(words, part, position, which)
        if count:
            break
    return count


class Scratch(NamedTuple):
    """The working arrays of a look-up.

    Attributes:
        found: i8 [MAX_CANDIDATES, COLUMNS], the candidates.
        weights: f8 [MAX_CANDIDATES], weights of their votes.
        next_tokens, choices, votes: i8, i8 and f8 [MAX_CANDIDATES], next token of each candidate,
            the distinct next tokens, and their votes.
        recent: i8 [KEY_TOKENS], last tokens of the context, newest first.
        lead: i8 [COLUMNS], output: the candidate that the first token was mostly read from.
    """

    found: NDArray[np.int64]
    weights: NDArray[np.float64]
    next_tokens: NDArray[np.int64]
    choices: NDArray[np.int64]
    votes: NDArray[np.float64]
    recent: NDArray[np.int64]
    lead: NDArray[np.int64]


@jit
def rank_tokens(
    store: Any,
    scratch: Any,
    count: int,
    parameters: Any,
    effect: Any,
    failure_partition: int,
    epoch: int,
    floor: float,
    max_tokens: int,
    drafts: Any,
    row: int,
) -> int:
    """Draft the tokens with the greatest weight; return their number.

    Args:
        store: `layout.Store`.
        scratch: working arrays with `count` candidates and their weights. They are overwritten:
            candidates that disagree are removed. `recent` is overwritten, too.
        count: number of candidates.
        parameters: `acceptance.AcceptanceParameters`.
        effect: the request's effect (`acceptance`).
        failure_partition: partition whose failure table is used, or -1 for none.
        epoch: present epoch (`failure_table.half_life_epoch`).
        floor: minimum survival of a drafted token.
        max_tokens: maximum number of tokens.
        drafts: `DraftBatch`; tokens, survival, cells and keys of this `row` are the output.
        row: row of `drafts`.
    """
    words, parts = store.words, store.parts
    found, weights, recent = scratch.found, scratch.weights, scratch.recent
    next_tokens, choices, votes = scratch.next_tokens, scratch.choices, scratch.votes
    agreeing, survives = count, 1.0
    for depth in range(max_tokens):
        continuing = 0
        for which in range(agreeing):
            part = parts[found[which, PARTITION]]
            position = found[which, POSITION] + 1 + depth
            token = SEPARATOR
            if position < part.head:
                token = words[part.tokens + ring_offset(part, position)]
            if token != SEPARATOR:
                if continuing != which:
                    copy_candidate(found, which, continuing)
                    weights[continuing] = weights[which]
                next_tokens[continuing] = token
                continuing += 1
        if continuing == 0:
            return depth

        options = 0
        for which in range(continuing):
            option = 0
            while option < options and choices[option] != next_tokens[which]:
                option += 1
            if option == options:
                choices[option], votes[option] = next_tokens[which], 0.0
                options += 1
            votes[option] += weights[which]

        total, best, best_votes, best_failures, best_key = 0.0, -1, -1.0, 0, 0
        for option in range(options):
            failures, key, vote = 0, failure_key(recent, choices[option]), votes[option]
            if failure_partition >= 0:
                refused, accepted = outcome_counts(words, parts[failure_partition], key, epoch)
                vote *= (1.0 + accepted) / (1.0 + refused)
                failures = failure_bucket(refused, accepted)
            total += vote
            if vote > best_votes:
                best, best_votes, best_failures, best_key = choices[option], vote, failures, key

        agreeing, lead = 0, 0
        for which in range(continuing):
            if next_tokens[which] == best:
                if agreeing != which:
                    copy_candidate(found, which, agreeing)
                    weights[agreeing] = weights[which]
                if weights[agreeing] > weights[lead]:
                    lead = agreeing
                agreeing += 1
        if depth == 0:
            for column in range(COLUMNS):
                scratch.lead[column] = found[lead, column]
        cell = encode_features(
            found[lead, SOURCE],
            MATCH_BUCKET[found[lead, MATCH]],
            agreement_bucket(agreeing, best_votes / total),
            best_failures,
            POSITION_BUCKET[min(depth, _LAST_POSITION)],
        )
        survives *= acceptance_probability(parameters, effect, cell)
        if survives < floor:
            return depth
        drafts.tokens[row, depth], drafts.survival[row, depth] = best, survives
        drafts.cells[row, depth], drafts.keys[row, depth] = cell, best_key
        for back in range(KEY_TOKENS - 1, 0, -1):
            recent[back] = recent[back - 1]
        recent[0] = best
    return max_tokens
