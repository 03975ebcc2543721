"""Which continuations were refused, and how often lately: no draft should fail the same way twice.

A partition's table is direct mapped: by the hash of the last KEY_TOKENS tokens and of the token
refused behind them it holds a tag and a count. A count is worth half as much for each HALF_LIFE_S
that has passed since it was last raised, and an entry worth nothing gives way to another. Two
continuations with one slot and tag look alike (1 in 2^31 of those in a slot); that costs a draft,
never an answer.

The count is evidence, not a verdict: `trie` halves a refused token's weight for each refusal, and
the calibration learns, in cells of their own, how often such tokens are accepted after all.
"""

from __future__ import annotations

from typing import Any

from headrace_decode.speculation.anchors import add_token
from headrace_decode.speculation.jit import jit
from headrace_decode.speculation.layout import FAILURE_BITS, FAILURES

KEY_TOKENS = 4
HALF_LIFE_S = 300.0
MOST = 15
_EPOCHS = 1 << 26


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
def refusals(words: Any, part: Any, key: int, epoch: int) -> int:
    """What the refusals under this key are worth now."""
    if part[FAILURE_BITS] < 0:
        return 0
    at = part[FAILURES] + 2 * (key & ((1 << part[FAILURE_BITS]) - 1))
    if words[at] != _tag(key):
        return 0
    return _worth(words[at + 1], epoch)


@jit
def refuse(words: Any, part: Any, key: int, epoch: int) -> None:
    """Count one more refusal under this key. A slot that another holds loses one instead."""
    if part[FAILURE_BITS] < 0:
        return
    at = part[FAILURES] + 2 * (key & ((1 << part[FAILURE_BITS]) - 1))
    worth = _worth(words[at + 1], epoch)
    if words[at] == _tag(key) or worth == 0:
        worth = min(worth + 1, MOST) if words[at] == _tag(key) else 1
        words[at] = _tag(key)
    else:
        worth -= 1
    words[at + 1] = (epoch << 4) | worth


@jit
def forgive(words: Any, part: Any, key: int) -> None:
    """The continuation was accepted: what was held against it no longer counts."""
    if part[FAILURE_BITS] < 0:
        return
    at = part[FAILURES] + 2 * (key & ((1 << part[FAILURE_BITS]) - 1))
    if words[at] == _tag(key):
        words[at + 1] = 0


@jit
def _tag(key: int) -> int:
    return (key >> 32) & 0x7FFFFFFF


@jit
def _worth(entry: int, epoch: int) -> int:
    halvings = ((epoch - (entry >> 4)) % _EPOCHS) if entry else 0
    return (entry & MOST) >> min(halvings, 4)
