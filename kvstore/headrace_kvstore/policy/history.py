"""History of prompts and of blocks, whether these are in the store or were evicted long ago.

It has two tables of fixed size. A *prompt* row follows one conversation: the time of its last
prompt, that prompt's length, its turn, the usual gap between its turns, and the age up to which its
waiting was counted. A *block* entry names the prompt row that passed a block last. It takes 24
bytes, a millionth of the block's own, so far more blocks are remembered than kept. Both tables drop
the oldest first.

A prompt continues a row if it begins with all blocks of that row's last prompt. Otherwise it begins
a new row, also if it shares a beginning with other prompts (a system prompt).
"""

from __future__ import annotations

import numpy as np

from headrace_kvstore.numba_jit import jit
from headrace_kvstore.policy.hazard import AGE_EDGES_S, AGES, FRESH, LENGTHS, PACES, TURNS

PROMPT = np.dtype(
    [
        ("serial", "i8"),  # 0: empty; the row is serial modulo rows
        ("seen_s", "f8"),  # when its last turn arrived
        ("counted_s", "f8"),  # its waiting is in the exposures up to here
        ("pace_s", "f8"),  # `usual_gap_s`; below 0: it had one turn
        ("turn", "i4"),
        ("cell", "i4"),  # features of its last turn, an index of hazard's cells
        ("blocks", "i8"),  # length of its last prompt
    ],
    align=True,
)

BLOCK = np.dtype([("key", "u8"), ("serial", "i8"), ("seen_s", "f8")], align=True)
WAYS = 8  # entries that compete for one place

PACE_TURNS = 8
"""Number of gaps after which a conversation's usual gap follows new ones."""
MIN_GAP_S = 1e-3

_EDGES = AGE_EDGES_S.copy()


@jit(nogil=True)
def age_bin(age_s):  # type: ignore[no-untyped-def]
    low, high = 0, AGES - 1
    while low < high:
        middle = (low + high + 1) // 2
        if _EDGES[middle] <= age_s:
            low = middle
        else:
            high = middle - 1
    return low


@jit(nogil=True)
def _log2(n, top):  # type: ignore[no-untyped-def]
    k = 0
    while n > 1 and k < top:
        n >>= 1
        k += 1
    return k


@jit(nogil=True)
def usual_gap_s(before_s, gap_s, turn):  # type: ignore[no-untyped-def]
    """Return the geometric mean of a conversation's gaps. After `PACE_TURNS` gaps, older ones count
    less and less.

    before_s: the mean without `gap_s`. turn: number of gaps, with `gap_s`.
    """
    gap_s = max(gap_s, MIN_GAP_S)
    if turn <= 1 or not before_s > 0.0:
        return gap_s
    share = 1.0 / min(turn, PACE_TURNS)
    return before_s ** (1.0 - share) * gap_s**share


@jit(nogil=True)
def cell_of(pace_s, turn, fresh, blocks):  # type: ignore[no-untyped-def]
    """Return the cell of a prompt, with the classes of hazard.py; `pace_s` below 0: no turn
    before."""
    pace = 0 if pace_s < 0.0 else 1 + _log2(int(2.0 * min(pace_s, 1e6)), PACES - 2)
    turns = min(turn, 2) if turn < 3 else 3 + _log2((turn - 1) // 2, TURNS - 4)
    news = 0 if fresh == 0 else 1 + _log2(fresh, FRESH - 2)
    length = max(0, _log2(blocks, LENGTHS) - 1)
    return ((pace * TURNS + turns) * FRESH + news) * LENGTHS + length


@jit(nogil=True)
def count_waiting(row, now_s, exposure_s):  # type: ignore[no-untyped-def]
    """Add the seconds that a prompt waited since it was last counted."""
    if not 0 <= row.cell < len(exposure_s):
        return
    start, end = row.counted_s - row.seen_s, now_s - row.seen_s
    k = age_bin(start)
    while start < end:
        until = min(end, _EDGES[k + 1]) if k + 1 < AGES else end
        exposure_s[row.cell, k] += until - start
        start, k = until, k + 1
    row.counted_s = max(row.counted_s, now_s)


@jit(nogil=True)
def count_all(prompts, now_s, exposure_s):  # type: ignore[no-untyped-def]
    for row in prompts:
        if row.serial > 0:
            count_waiting(row, now_s, exposure_s)


@jit(nogil=True)
def find(blocks, key):  # type: ignore[no-untyped-def]
    """Return the entry of `key`, or -1 - the entry to use for it."""
    places = len(blocks) // WAYS
    start = int(np.int64((key * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(20))) % places * WAYS
    oldest = start
    for at in range(start, start + WAYS):
        if blocks[at].serial != 0 and blocks[at].key == key:
            return at
        if blocks[at].serial == 0 or blocks[at].seen_s < blocks[oldest].seen_s:
            oldest = at
            if blocks[at].serial == 0:
                break
    return -1 - oldest


@jit(nogil=True)
def record_prompt(keys, now_s, prompts, blocks, next_serial, events, exposure_s):  # type: ignore[no-untyped-def]
    """Record a prompt's arrival; return its row's serial, 0 for a prompt without blocks."""
    if len(keys) == 0:
        return 0
    known, last = 0, -1
    while known < len(keys):
        at = find(blocks, keys[known])
        if at < 0:
            break
        last = at
        known += 1
    serial = 0
    if known > 0:
        held = blocks[last].serial
        row = prompts[held % len(prompts)]
        if row.serial == held and known == row.blocks:
            serial = held
    if serial > 0:
        row = prompts[serial % len(prompts)]
        count_waiting(row, now_s, exposure_s)
        gap_s = max(0.0, now_s - row.seen_s)
        if 0 <= row.cell < len(events):
            events[row.cell, age_bin(gap_s)] += 1.0
        row.turn += 1
        row.pace_s = usual_gap_s(row.pace_s, gap_s, row.turn)
    else:
        serial = next_serial[0]
        next_serial[0] += 1
        row = prompts[serial % len(prompts)]
        if row.serial > 0:
            count_waiting(row, now_s, exposure_s)
        row.serial = serial
        row.turn = 0
        row.pace_s = -1.0
    row.cell = cell_of(row.pace_s, row.turn, len(keys) - known, len(keys))
    row.blocks = len(keys)
    row.seen_s = now_s
    row.counted_s = now_s
    for key in keys:
        at = find(blocks, key)
        if at < 0:
            at = -1 - at
            blocks[at].key = key
        blocks[at].serial = serial
        blocks[at].seen_s = now_s
    return serial
