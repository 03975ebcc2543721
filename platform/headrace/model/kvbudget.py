"""Decides how an engine keeps within a budget of KV: by which technique, with which share.

An engine is to answer n requests at once, each with p prompt tokens and a answer tokens.

| way       | blocks of its cache                                     | beside it    | host memory |
|-----------|---------------------------------------------------------|--------------|-------------|
| all       | n * whole                                               |              |             |
| bounded   | whole + reading + (n - 1) * (kept + tail)               |              |             |
| streamed  | n * described + kept + segment + step                   | see below    | see below   |
|           | + (n - 1) * (kept + tail)                               |              |             |
| offloaded | n * (slots + window); if that is whole or more:         | see below    | n * whole   |
|           | whole + (n - 1) * (slots + window)                      |              |             |

`whole` is p + a in blocks. A bounded context is kept in `kept` blocks, a share of its prompt's
whole blocks, and `tail` blocks for all tokens after these. One context at a time is whole, and the
tokens that read it again are in `reading` blocks (docs/bounded.md). A streamed context is never
whole: one at a time is longer than its kept blocks by `segment` and `step`. Streaming needs a gate.
For the store, `described` further blocks describe the kept ones
(`headrace_decode.compression.engine.stored`). If the cache is then smaller than `whole`, host
memory holds one whole context, for requests that refuse the technique. `slots` and `window` are
those of `headrace_decode.sparse.offload.sizes`. A context that is longer than the cache is computed
within the window. A context that fits arrives as a whole, and leaves when the next one comes.
Beside the cache of an engine with host memory are the summaries of all units, and one layer of one
context, in which its KV is put in order.

A step in which all requests answer reads the model's weights and the KV that they attend to: all KV
in the cache, or, of an offloaded context, the chosen units and the summaries of all. On CPUs these
reads take the time of the step (docs/bounded.md), so a target for the time between tokens limits
`read`.

Each way takes the largest share that fits. The way with the least error (KL) is chosen. KL was
measured at some shares. Between them it is interpolated, linearly in logarithms. For a share below
the least measured one there is no prediction.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from headrace.model.facts import ModelFacts
from headrace.model.registry import ModelError
from headrace_decode.compression.engine.course import (
    EARLIER_TOKENS,
    MIN_FREED,
    SEGMENT_TOKENS,
    kept_blocks,
)
from headrace_decode.compression.engine.stored import Layout as Described
from headrace_decode.compression.scores import LEAD_TOKENS, PART_TOKENS
from headrace_decode.sparse.basis import COORDINATES
from headrace_decode.sparse.engine.counts import MIN_TOKENS, chosen_units
from headrace_decode.sparse.layout import Layout
from headrace_decode.sparse.offload.sizes import footprint
from headrace_decode.sparse.summaries import RANK_BESIDE

BOUNDED_KL = {0.5: 0.0004, 0.25: 0.0054, 0.12: 0.037}
"""Mean KL of a token in nats by share, if an engine reads contexts again to choose what it keeps:
SmolLM2-135M, six contexts of 3,000 tokens (docs/bounded.md, `python -m benchmarks.longcontext`)."""
BLOCK_TOKENS = 128
"""Tokens of a block in engines on CPUs. Only these engines drop or offload KV."""
STEP_TOKENS = 128
"""Maximum number of prompt tokens that one step computes of an offloaded context."""
STREAM_STEP_TOKENS = 512
"""Maximum number of prompt tokens that one step computes of a streamed context."""
STEPS_UNDER_WAY = 2
NULL_BLOCK = 1
"""Number of blocks that vLLM gives to no request."""
SUM_BYTES = 8
"""Bytes of a unit's sum in each layer."""
UNCALIBRATED = "needs techniques.sparse.calibration, a file of `headrace lab calibrate sparse`"
NO_GATE = "needs techniques.bounded.calibration, a file of `headrace lab calibrate bounded`"
GIB = 1 << 30

Curve = Mapping[float, float]
"""Mean KL of a token in nats, by share."""


@dataclass(frozen=True)
class Asked:
    """Requirements of an engine: the contexts to hold, and the memory for them.

    Attributes:
        budget_bytes: for KV, and for the data beside it by which units are chosen. host_bytes: for
            offloaded KV.
        contexts: number of contexts at once. context_tokens: tokens of each context, its
            `answer_tokens` included.
        read_bytes: maximum bytes of KV that a step reads in which all requests answer; None: no
            limit.
    """

    budget_bytes: int
    contexts: int
    context_tokens: int
    answer_tokens: int
    host_bytes: int = 0
    read_bytes: int | None = None

    def __post_init__(self) -> None:
        for name in ("budget_bytes", "contexts", "context_tokens", "answer_tokens"):
            if getattr(self, name) < 1:
                raise ModelError(f"{name} is {getattr(self, name)}: it must be above 0")
        if self.answer_tokens >= self.context_tokens:
            raise ModelError(
                f"answers of {self.answer_tokens} tokens leave nothing of contexts of "
                f"{self.context_tokens}"
            )


class Sizes(NamedTuple):
    """Bytes that a way needs: `cache` in the engine's KV cache, `beside` it for choosing, `host` in
    host memory. `read`: bytes of them that a step reads in which all contexts answer at their full
    length."""

    cache: int
    read: int
    beside: int = 0
    host: int = 0

    def lacks(self, asked: Asked) -> str:
        """Return the requirements that are not met, in words; empty if all are."""
        found = []
        if self.cache + self.beside > asked.budget_bytes:
            found.append(f"{(self.cache + self.beside) / GIB:.3g} GiB")
        if self.host > asked.host_bytes:
            found.append(f"{self.host / GIB:.3g} GiB of host memory")
        needs = f"needs {' and '.join(found)}" if found else ""
        if asked.read_bytes is None or self.read <= asked.read_bytes:
            return needs
        reads = f"reads {self.read / GIB:.3g} GiB a step, over {asked.read_bytes / GIB:.3g}"
        return "; ".join(filter(None, (needs, reads)))


@dataclass(frozen=True)
class Way:
    """One way to hold the contexts, with the largest share that fits.

    Attributes:
        name: "all", "bounded", "streamed" or "offloaded".
        share: of the KV that is kept, or attended to; if none fits, the least one.
        kl: expected mean KL of a token in nats; None if the way is not possible at any share.
        why_not: why it cannot be taken; empty if it can.
    """

    name: str
    share: float
    kl: float | None
    sizes: Sizes
    why_not: str = ""


@dataclass(frozen=True)
class Plan:
    """Requirements of an engine, and each way to meet them, in the order of the table above."""

    asked: Asked
    ways: list[Way]

    @property
    def chosen(self) -> Way:
        """The possible way with the least error.

        Raises:
            ModelError: no way is possible; the text says what each one lacks.
        """
        possible = [way for way in self.ways if not way.why_not]
        if not possible:
            lacks = "; ".join(f"{way.name}: {way.why_not}" for way in self.ways)
            raise ModelError(f"nothing keeps to {self.asked.budget_bytes / GIB:.3g} GiB: {lacks}")
        return min(possible, key=lambda way: way.kl or 0.0)


def kl_at(curve: Curve, share: float) -> float:
    """Return the KL at a share. Between two measured shares it is interpolated, linearly in
    logarithms; above all of them it is that of the largest.

    Raises:
        ValueError: the share is below the least one that was measured.
    """
    shares = sorted(curve)
    if share < shares[0]:
        raise ValueError(f"{share:g} is below {shares[0]:g}, the least share that was measured")
    for low, high in pairwise(shares):
        if share <= high:
            part = math.log(share / low) / math.log(high / low)
            return float(curve[low] ** (1 - part) * curve[high] ** part)
    return curve[shares[-1]]


def plan(
    facts: ModelFacts,
    asked: Asked,
    sparse_kl: Curve | None = None,
    unit_tokens: int = 32,
    refused: Mapping[str, str] | None = None,
    bounded_kl: Curve | None = None,
) -> Plan:
    """Return all ways to hold the contexts; `Plan.chosen` is the best one.

    Args:
        facts: of the model; `dtype_bytes` as the engine keeps KV.
        sparse_kl: of the model, from `headrace lab calibrate sparse`. Without it nothing is
            offloaded.
        unit_tokens: tokens of a unit, which sparse attention chooses as a whole.
        refused: why the engine cannot take a way, by the name of the way.
        bounded_kl: of the model, from `headrace lab calibrate bounded`. Without it nothing is
            streamed, and contexts are read again (`BOUNDED_KL`).
    """
    block_bytes = BLOCK_TOKENS * facts.kv_bytes_per_token
    gated = bool(bounded_kl)
    bounded_kl = bounded_kl or BOUNDED_KL

    def whole(_: float) -> Sizes:
        blocks = asked.contexts * _blocks(asked.context_tokens)
        return Sizes((NULL_BLOCK + blocks) * block_bytes, blocks * block_bytes)

    def bounded(share: float) -> Sizes:
        held = asked.contexts * sum(_kept(asked, share))
        return Sizes((NULL_BLOCK + bounded_blocks(asked, share)) * block_bytes, held * block_bytes)

    def streamed(share: float) -> Sizes:
        return _streamed(facts, asked, share, unit_tokens)

    def offloaded(share: float) -> Sizes | None:
        return _offloaded(facts, asked, share, unit_tokens)

    of_ways: dict[str, tuple[Curve, Callable[[float], Sizes | None]]] = {
        "all": ({1.0: 0.0}, whole),
        "bounded": (bounded_kl, bounded),
        "streamed": (bounded_kl, streamed),
        "offloaded": (sparse_kl or {}, offloaded),
    }
    too_short = _too_short(asked, min(bounded_kl))
    none = {
        "bounded": too_short,
        "streamed": too_short if gated else NO_GATE,
        "offloaded": "" if sparse_kl else UNCALIBRATED,
    }
    none |= {name: why for name, why in (refused or {}).items() if why}
    return Plan(
        asked,
        [
            Way(name, 0.0, None, Sizes(0, 0), none[name])
            if none.get(name)
            else _fitting(name, curve, asked, sizes)
            for name, (curve, sizes) in of_ways.items()
        ],
    )


def bounded_blocks(asked: Asked, share: float) -> int:
    """Return the blocks of a cache in which all contexts are served at once. Contexts are bounded
    one after the other, so at most one is whole (`python -m benchmarks.longcontext.dropping`)."""
    reading = _blocks(EARLIER_TOKENS + LEAD_TOKENS + PART_TOKENS + 1)
    return _blocks(asked.context_tokens) + reading + (asked.contexts - 1) * sum(_kept(asked, share))


def streamed_blocks(asked: Asked, share: float) -> int:
    """Return the blocks of a cache in which all contexts are served at once, and streamed one after
    the other."""
    kept, tail = _kept(asked, share)
    longer = _blocks(SEGMENT_TOKENS) + _blocks(STREAM_STEP_TOKENS)
    return kept + max(tail, longer) + (asked.contexts - 1) * (kept + tail)


def _kept(asked: Asked, share: float) -> tuple[int, int]:
    """Return the blocks that a context is kept in: a share of its prompt's, and all after these."""
    context = asked.context_tokens - asked.answer_tokens
    tail = _blocks(context % BLOCK_TOKENS + asked.answer_tokens)
    return kept_blocks(context // BLOCK_TOKENS, share), tail


def _too_short(asked: Asked, least_share: float) -> str:
    """Return why bounding frees nothing of such contexts; empty if it frees something."""
    context = asked.context_tokens - asked.answer_tokens
    blocks = context // BLOCK_TOKENS
    freed = blocks - kept_blocks(blocks, least_share)
    return "" if freed >= MIN_FREED else f"a prompt of {context} tokens is too short to drop from"


def _offloaded(facts: ModelFacts, asked: Asked, share: float, unit_tokens: int) -> Sizes | None:
    """Return the sizes of offloaded contexts; None where no row would choose units."""
    chosen = chosen_units(asked.context_tokens, unit_tokens, share)
    if chosen is None:
        return None
    step_tokens = STEPS_UNDER_WAY * STEP_TOKENS
    one = footprint(asked.context_tokens, chosen, unit_tokens, BLOCK_TOKENS, step_tokens)
    cache, host = asked.contexts * one.blocks, asked.contexts * one.host
    if cache >= one.host:
        cache += one.host - one.blocks
    chosen_bytes = chosen * unit_tokens * facts.kv_bytes_per_token
    units = _blocks(asked.context_tokens) * BLOCK_TOKENS // unit_tokens
    read = asked.contexts * (chosen_bytes + _summaries(facts, units, unit_tokens))
    return _with_host(facts, cache + NULL_BLOCK, host, one.host, unit_tokens, read)


def _streamed(facts: ModelFacts, asked: Asked, share: float, unit_tokens: int) -> Sizes:
    whole, cache = _blocks(asked.context_tokens), streamed_blocks(asked, share)
    block_bytes = BLOCK_TOKENS * facts.kv_bytes_per_token
    layout = Described(facts.kv_layers, facts.kv_heads, unit_tokens, BLOCK_TOKENS, block_bytes)
    cache += asked.contexts * layout.described_in(_kept(asked, share)[0])
    read = asked.contexts * sum(_kept(asked, share)) * block_bytes
    if cache >= whole:
        return Sizes((cache + NULL_BLOCK) * block_bytes, read)
    return _with_host(facts, cache + NULL_BLOCK, whole, whole, unit_tokens, read)


def _with_host(
    facts: ModelFacts, cache: int, host: int, whole: int, unit_tokens: int, read: int
) -> Sizes:
    """Return the sizes of an engine with `cache` blocks, and `host` blocks in host memory. Its
    longest request has `whole` blocks."""
    beside = _summaries(facts, (cache + host) * BLOCK_TOKENS // unit_tokens, unit_tokens)
    block_bytes = BLOCK_TOKENS * facts.kv_bytes_per_token
    beside += whole * block_bytes // facts.kv_layers
    return Sizes(cache * block_bytes, read, beside, host * block_bytes)


def _summaries(facts: ModelFacts, units: int, unit_tokens: int) -> int:
    """Return the bytes of the summaries of `units` units."""
    layout = Layout(unit_tokens, facts.head_dim, RANK_BESIDE, COORDINATES)
    return units * facts.kv_layers * (facts.kv_heads * layout.nbytes + SUM_BYTES)


def _fitting(name: str, curve: Curve, asked: Asked, sizes: Callable[[float], Sizes | None]) -> Way:
    """Return the way with the largest share, in hundredths, that fits; else with the least share.

    Args:
        sizes: returns the sizes at a share; None where the way is not possible.
    """
    least, most = (round(100 * share) for share in (min(curve), max(curve)))
    short = f"only contexts of more than {MIN_TOKENS} tokens are offloaded"
    last = Way(name, 0.0, None, Sizes(0, 0), short)
    for share in (hundredths / 100 for hundredths in range(most, least - 1, -1)):
        needed = sizes(share)
        if needed is None:
            continue
        lacks = needed.lacks(asked)
        last = Way(name, share, kl_at(curve, share), needed, lacks)
        if not lacks:
            break
    return last


def _blocks(tokens: int) -> int:
    return math.ceil(tokens / BLOCK_TOKENS)
