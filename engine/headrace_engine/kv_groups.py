"""The KV cache groups of an engine: how many blocks a request takes, and which prefixes are hits.

vLLM gives each group of layers blocks of its own, all from one pool. Layers with full attention
keep all tokens. Layers with a sliding window keep the window, and recurrent layers (Mamba, GDN) the
last state. A block with the same hash in each group holds the same tokens. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta

FULL = frozenset({"full_attention", "mla_attention", "sink_full_attention"})
WINDOWS = frozenset({"sliding_window", "sliding_window_mla"})
STATE = "mamba"
STATE_BLOCKS = 2
"""Blocks of a request in a group of recurrent layers: the last state, and the next one."""
MAX_GROUPS = 64
Blocks = Annotated[int, Meta(ge=0, le=2**20)]


class Window(NamedTuple):
    """Groups that keep a part of a prefix, all with the same part.

    Attributes:
        blocks: number of blocks before the end of a prefix that are needed for a hit; 0: the last
            one, which has a state that the engine does not keep at each block.
        groups: numbers of the groups.
    """

    blocks: int
    groups: frozenset[int]

    @property
    def needed(self) -> int:
        """Number of blocks before the end of a prefix that are needed for a hit."""
        return max(1, self.blocks)


class HitGroups(NamedTuple):
    """Blocks of a prefix that an engine must hold to use it.

    Attributes:
        kept: numbers of the groups that need all blocks of the prefix.
        windows: groups that need its last blocks only.
    """

    kept: frozenset[int] = frozenset({0})
    windows: tuple[Window, ...] = ()


class BlockUse(msgspec.Struct, frozen=True):
    """Blocks that a request takes in all groups of an engine together. By default: one group of
    full attention.

    Attributes:
        kept: blocks for each `block_tokens` tokens in groups that keep all tokens.
        windowed: the same in groups that keep a window or a state, as long as nothing leaves it.
        window_blocks: maximum number of blocks that the latter keep of a request that decodes.
        prompt_blocks: the same of a prompt that is computed: also the tokens of the steps that vLLM
            has scheduled.
    """

    kept: Blocks = 1
    windowed: Blocks = 0
    window_blocks: Blocks = 0
    prompt_blocks: Blocks = 0

    def blocks(self, positions: float) -> float:
        """Return the blocks of a request that decodes.

        Args:
            positions: blocks that its tokens fill in a group that keeps all tokens.
        """
        return self.kept * positions + min(self.windowed * positions, self.window_blocks)

    @property
    def cached(self) -> int:
        """Blocks of the pool for each block of tokens, as long as none has been displaced."""
        return self.kept + self.windowed

    def positions(self, blocks: float) -> float:
        """Return how many blocks in a group that keeps all tokens a request has that takes this
        many in all groups together."""
        if blocks * self.windowed <= self.window_blocks * self.cached:
            return blocks / max(1, self.cached)
        return (blocks - self.window_blocks) / self.kept if self.kept else math.inf

    def held_tokens(self, blocks: float, requests: int, block_tokens: int) -> float:
        """Return the tokens of some requests that take these blocks together, if all are equally
        long."""
        if not self.windowed:
            return blocks / max(1, self.kept) * block_tokens
        many = max(1, requests)
        return many * min(self.positions(blocks / many), blocks) * block_tokens


def hit_groups(metadata: Sequence[Mapping[str, Any]], block_tokens: int) -> HitGroups:
    """Return what an engine must hold of a prefix to use it.

    If no group keeps all tokens, all blocks are needed of each group. That is too much, but an
    engine's events do not tell the order of blocks between which it has skipped some.

    Args:
        metadata: of each group, by vLLM: `group_idx`, `kind`, `block_size`, `sliding_window`.
        block_tokens: tokens of a block by which prompts are hashed.

    Raises:
        ValueError: hits of such groups are not known; the text says why.
    """
    if not 0 < len(metadata) <= MAX_GROUPS:
        raise ValueError(f"it has {len(metadata)} KV cache groups")
    kept, windows = set[int](), dict[int, set[int]]()
    for group in metadata:
        number, kind, size = int(group["group_idx"]), group["kind"], group["block_size"]
        if size != block_tokens:
            raise ValueError(f"its KV cache groups have blocks of {size} and {block_tokens} tokens")
        if kind in FULL:
            kept.add(number)
        elif kind in WINDOWS:
            blocks = max(1, -(-(int(group["sliding_window"]) - 1) // block_tokens))
            windows.setdefault(blocks, set()).add(number)
        elif kind == STATE:
            windows.setdefault(0, set()).add(number)
        else:
            raise ValueError(f"it has a KV cache group of the kind {kind}")
    if not kept:
        return HitGroups(frozenset(number for of in windows.values() for number in of))
    made = tuple(Window(blocks, frozenset(of)) for blocks, of in sorted(windows.items()))
    return HitGroups(frozenset(kept), made)


def block_use(
    metadata: Sequence[Mapping[str, Any]], block_tokens: int, scheduled_tokens: int
) -> BlockUse:
    """Return the blocks that a request takes.

    The maximum of a window is vLLM's own (`SlidingWindowSpec.max_admission_blocks_per_request`).
    Groups of other kinds count as if they kept all tokens.

    Args:
        metadata: as for `hit_groups`.
        scheduled_tokens: maximum number of tokens that vLLM has scheduled at a time.
    """
    kept = windowed = window_blocks = prompt_blocks = 0
    for group in metadata:
        size = int(group["block_size"])
        each = max(1, -(-block_tokens // size))
        if group["kind"] in WINDOWS:
            before = int(group["sliding_window"]) - 1
            windowed += each
            window_blocks += -(-before // size) + 1
            prompt_blocks += -(-(before + scheduled_tokens) // size) + 1
        elif group["kind"] == STATE:
            windowed += each
            window_blocks += STATE_BLOCKS
            prompt_blocks += STATE_BLOCKS
        else:
            kept += each
    if not metadata:
        return BlockUse()
    return BlockUse(kept, windowed, window_blocks, prompt_blocks)
