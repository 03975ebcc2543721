"""Message from the scheduler to the worker about the compressed requests of a step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from headrace_decode.compression.engine.context_scorer import RereadRows

COMPRESSION_KEY = "compression"
"""Key of `CompressionMetadata` in a step's metadata."""


class Retention(NamedTuple):
    """KV that a request keeps of its context from now on.

    Attributes:
        tokens: number of tokens of the context; of an incrementally compressed context, so far.
        blocks: blocks of the scheduler to keep it in.
        cached_id: number of the retained KV in `ContextCache`; None if it is not cached.
        description_blocks: number of the first blocks, which describe the others
            (`retained_format`).
    """

    tokens: int
    blocks: list[int]
    cached_id: int | None = None
    description_blocks: int = 0


class FitWork(NamedTuple):
    """Work of a step ahead of a `Retention`.

    Attributes:
        blocks: number of blocks that the context will be kept in.
        layers: number of layers to fit in this step.
    """

    blocks: int
    layers: int


@dataclass
class CompressionMetadata:
    """Message of the scheduler to the worker, with a step.

    Attributes:
        rereads: new requests that read a context again, by id.
        incremental: new requests whose context is streamed.
        layers: number of layers of the context being read, to score with the queries so far.
        fits: layers to fit, by request whose context was read and scored.
        retentions: KV to keep, by request.
        cached: number of the cached KV to begin with, by incremental request that begins.
        loaded: loaded KV (from the store) to begin with, by incremental request that begins.
        evicted: numbers of retained KV that is not cached any more.
    """

    rereads: dict[str, RereadRows] = field(default_factory=dict)
    incremental: set[str] = field(default_factory=set)
    layers: int = 0
    fits: dict[str, FitWork] = field(default_factory=dict)
    retentions: dict[str, Retention] = field(default_factory=dict)
    cached: dict[str, int] = field(default_factory=dict)
    loaded: dict[str, Retention] = field(default_factory=dict)
    evicted: set[int] = field(default_factory=set)
