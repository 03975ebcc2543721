"""Work that the scheduler's side of the connector gives the worker's side with each step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from headrace_engine.step_time import pairs_of


@dataclass(frozen=True, slots=True)
class BlockLoad:
    """Blocks to copy from the store into the engine's cache, by block id and block hash.

    Attributes:
        blocks: block ids, a list for each cache group; negative where vLLM gave a group no block,
            because the position lies outside of its window.
        hashes: their block hashes.
        places: where slower tiers hold those that may not be in DRAM, by hash.
        limits_s: maximum duration of the load, for each request that loads from slower tiers.
        until_s: end of the lease of the places, for each of these requests, by this machine's
            `time.monotonic`.
    """

    blocks: list[list[int]] = field(default_factory=list)
    hashes: list[bytes] = field(default_factory=list)
    places: dict[bytes, Any] = field(default_factory=dict)
    limits_s: list[float] = field(default_factory=list)
    until_s: list[float] = field(default_factory=list)

    @property
    def block_ids(self) -> np.ndarray:
        """The block ids, int64 [n, cache groups]."""
        return np.array(self.blocks, np.int64).T


@dataclass(frozen=True, slots=True)
class BlockSave:
    """Blocks of one request to copy into the store, with their places in the prompt for the
    eviction policy.

    Attributes:
        blocks: block ids in the engine's cache, a list for each cache group.
        hashes: their block hashes.
        parents: the hash of the block before each; empty for a root.
        depths: number of blocks before each.
        tenant: the request's cache salt.
        compute_s: predicted seconds to compute each; 0 before anything was measured.
    """

    blocks: list[list[int]]
    hashes: list[bytes]
    parents: list[bytes]
    depths: list[int]
    tenant: str = ""
    compute_s: list[float] | float = 0.0

    @property
    def block_ids(self) -> np.ndarray:
        """The block ids, int64 [n, cache groups]."""
        return np.array(self.blocks, np.int64).T

    @property
    def engine_blocks(self) -> int:
        """Number of the engine's blocks, of all groups."""
        return len(self.hashes) * len(self.blocks)


class StepShape(NamedTuple):
    """Amount of a step's computation.

    Attributes:
        prompt: prompt tokens.
        rows: requests that decode, one token each. draft: draft tokens.
        context: tokens of all rows.
        pairs: sum over the prompt tokens of the tokens that each attends to.
    """

    prompt: int
    rows: int
    draft: int
    context: int
    pairs: int


@dataclass(frozen=True, slots=True)
class StoreWork:
    """Work of the worker's side in one step: `load` for the step itself, `ahead` by request for a
    later one, `saves` by job number; `shape` of a step that computes prompts."""

    load: BlockLoad = field(default_factory=BlockLoad)
    ahead: dict[str, BlockLoad] = field(default_factory=dict)
    saves: dict[int, BlockSave] = field(default_factory=dict)
    shape: StepShape | None = None


def step_shape(output: Any) -> StepShape:
    """Return the shape of the step in vLLM's SchedulerOutput. A prompt whose only missing token is
    computed counts as a row."""
    cached = output.scheduled_cached_reqs
    before = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    before |= {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
    prompt = rows = draft = context = attended = 0
    for name, tokens in output.num_scheduled_tokens.items():
        drafted = len(output.scheduled_spec_decode_tokens.get(name, ()))
        start = before.get(name, 0)
        if tokens - drafted > 1:
            prompt, attended = prompt + tokens, attended + pairs_of(start, start + tokens)
        else:
            rows, draft, context = rows + 1, draft + drafted, context + start + 1
    return StepShape(prompt, rows, draft, context, attended)
