"""Counts recent refusals of continuations, so that no draft fails in the same way twice.

A partition's table is direct mapped. Under the hash of the last KEY_TOKENS tokens and of the token
drafted after them it has a tag and two counts: how often the token was refused, and how often it
was accepted. Both counts are halved for each HALF_LIFE_S since they last changed, and an entry with
low counts is replaced by another. Two continuations with the same slot and tag are confused (1 in
2^31 of those in a slot); that costs a draft, never an answer.

The counts are evidence, not a rule: `candidate_ranking` weighs a token's votes by (1 + accepted) /
(1 + refused), and `acceptance` learns with separate weights how often such tokens are right.
"""

from __future__ import annotations

from typing import Any

from headrace_decode.speculative.jit import jit
from headrace_decode.speculative.retrieval.ngram_index import extend_hash

KEY_TOKENS = 2
HALF_LIFE_S = 3600.0
MAX_COUNT = 15
_EPOCHS = 1 << 22


@jit
def half_life_epoch(now_s: float) -> int:
    """Return the number of half-lives since the clock's zero."""
    return int(now_s / HALF_LIFE_S) % _EPOCHS


@jit
def failure_key(recent: Any, token: int) -> int:
    """Return the hash of a token and of the tokens before it, `recent` [KEY_TOKENS], newest first.

    The result is the key of `outcome_counts` and `record_outcome`.
    """
    state = extend_hash(0, token)
    for back in range(KEY_TOKENS):
        state = extend_hash(state, recent[back])
    return state ^ (state >> 31)


@jit
def outcome_counts(words: Any, part: Any, key: int, epoch: int) -> tuple[int, int]:
    """Return the present counts of refusals and acceptances of this key's continuation."""
    at = _slot(part, key)
    if words[at] != _tag(key):
        return 0, 0
    return _decayed_counts(words[at + 1], epoch)


@jit
def record_outcome(words: Any, part: Any, key: int, accepted: bool, epoch: int) -> None:
    """Count one more outcome under this key.

    If another key has the slot, its counts are halved; it is replaced once they are at most 1 in
    all.
    """
    at = _slot(part, key)
    refusals, successes = _decayed_counts(words[at + 1], epoch)
    if words[at] != _tag(key) and refusals + successes > 1:
        words[at + 1] = _pack_counts(epoch, refusals >> 1, successes >> 1)
        return
    if words[at] != _tag(key):
        words[at], refusals, successes = _tag(key), 0, 0
    if accepted:
        successes = min(successes + 1, MAX_COUNT)
    else:
        refusals = min(refusals + 1, MAX_COUNT)
    words[at + 1] = _pack_counts(epoch, refusals, successes)


@jit
def _slot(part: Any, key: int) -> int:
    return part.failures + 2 * (key & ((1 << part.failure_bits) - 1))


@jit
def _tag(key: int) -> int:
    return (key >> 32) & 0x7FFFFFFF


@jit
def _pack_counts(epoch: int, refused: int, accepted: int) -> int:
    return (epoch << 8) | (accepted << 4) | refused


@jit
def _decayed_counts(entry: int, epoch: int) -> tuple[int, int]:
    halvings = min((epoch - (entry >> 8)) % _EPOCHS, 4)
    return (entry & MAX_COUNT) >> halvings, ((entry >> 4) & MAX_COUNT) >> halvings
