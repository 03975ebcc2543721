"""Which continuations were refused, and how often lately: no draft should fail the same way twice.

A partition's table is direct mapped: by the hash of the last KEY_TOKENS tokens and of the token
drafted behind them it holds a tag and two counts, how often that was refused and how often accepted
after all. Both are worth half as much for each HALF_LIFE_S that has passed since they last changed,
and an entry worth little gives way to another. Two continuations with one slot and tag look alike
(1 in 2^31 of those in a slot); that costs a draft, never an answer.

The counts are evidence, not a verdict: `retrieve` weighs a token's votes by (1 + accepted) /
(1 + refused), and the calibration learns, in cells of their own, how often such tokens are right.
"""

from __future__ import annotations

from typing import Any

from headrace_decode.speculation.jit import jit
from headrace_decode.speculation.retrieval.anchors import add_token

KEY_TOKENS = 2
HALF_LIFE_S = 3600.0
MOST = 15
_EPOCHS = 1 << 22


@jit
def epoch_of(now_s: float) -> int:
    """Half-lives since the clock's zero."""
    return int(now_s / HALF_LIFE_S) % _EPOCHS


@jit
def key_of(recent: Any, token: int) -> int:
    """Hash of `recent` [KEY_TOKENS], the tokens before it, newest first, and a token."""
    state = add_token(0, token)
    for back in range(KEY_TOKENS):
        state = add_token(state, recent[back])
    return state ^ (state >> 31)


@jit
def evidence(words: Any, part: Any, key: int, epoch: int) -> tuple[int, int]:
    """How often the continuation of this key was refused and accepted, as far as it counts now."""
    at = _slot(part, key)
    if words[at] != _tag(key):
        return 0, 0
    return _worth(words[at + 1], epoch)


@jit
def witness(words: Any, part: Any, key: int, accepted: bool, epoch: int) -> None:
    """Count one more outcome under this key. A slot that another holds is worth half as much
    afterwards, and taken once it is worth next to nothing."""
    at = _slot(part, key)
    refusals, successes = _worth(words[at + 1], epoch)
    if words[at] != _tag(key) and refusals + successes > 1:
        words[at + 1] = _entry(epoch, refusals >> 1, successes >> 1)
        return
    if words[at] != _tag(key):
        words[at], refusals, successes = _tag(key), 0, 0
    if accepted:
        successes = min(successes + 1, MOST)
    else:
        refusals = min(refusals + 1, MOST)
    words[at + 1] = _entry(epoch, refusals, successes)


@jit
def _slot(part: Any, key: int) -> int:
    return part.failures + 2 * (key & ((1 << part.failure_bits) - 1))


@jit
def _tag(key: int) -> int:
    return (key >> 32) & 0x7FFFFFFF


@jit
def _entry(epoch: int, refused: int, accepted: int) -> int:
    return (epoch << 8) | (accepted << 4) | refused


@jit
def _worth(entry: int, epoch: int) -> tuple[int, int]:
    halvings = min((epoch - (entry >> 8)) % _EPOCHS, 4)
    return (entry & MOST) >> halvings, ((entry >> 4) & MOST) >> halvings
