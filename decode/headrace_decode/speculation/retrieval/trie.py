"""Which of the candidates' continuations to draft: an implicit trie, walked along its heaviest way.

The continuations of the few survivors share prefixes, so they form a trie; it is never built. At
each depth the candidates that agreed so far vote on the next token. A candidate's vote weighs what
the odds of a lone candidate of its source and match length are (`acceptance.Acceptance.votes`); a
token's votes count by what is known of it at this place (`refusals`), times (1 + accepted) /
(1 + refused). The heaviest token is drafted, with its chance (`acceptance`). The draft ends when no
candidate goes on or survival falls below a floor.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace_decode.speculation.jit import jit
from headrace_decode.speculation.retrieval.acceptance import (
    MATCH_BUCKET,
    POSITION_BUCKET,
    agreement_of,
    cell_of,
    chance,
    known_of,
)
from headrace_decode.speculation.retrieval.anchors import place
from headrace_decode.speculation.retrieval.refusals import KEY_TOKENS, evidence, key_of
from headrace_decode.speculation.retrieval.retrieve import (
    COLUMNS,
    MATCH,
    PARTITION,
    POSITION,
    SOURCE,
    move,
)
from headrace_decode.speculation.retrieval.segments import SEPARATOR

LAST_POSITION = len(POSITION_BUCKET) - 1


class Scratch(NamedTuple):
    """Arrays that a look-up works in.

    Attributes:
        found: i8 [CANDIDATES, COLUMNS], the candidates. weights: f8 [CANDIDATES], of their votes.
        upcoming, choices, votes: i8, i8 and f8 [CANDIDATES].
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
    """Draft along the heaviest way; how many tokens.

    Args:
        scratch: its first `count` candidates and their weights; order is lost: those that disagree
            drop out. `recent` is overwritten.
        failing: partition whose failure memory is asked, or -1 for none.
        drafts: `draft.DraftBatch`; tokens, survival, cells and keys of this `row` are the output.
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
            POSITION_BUCKET[min(depth, LAST_POSITION)],
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
