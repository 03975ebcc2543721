"""Chooses how an engine keeps within a memory budget for KV: the technique, and its keep ratio.

An engine is to answer n requests at once, each with p prompt tokens and a answer tokens.

| option      | blocks of its cache                             | beside it | host memory |
|-------------|-------------------------------------------------|-----------|-------------|
| full        | n * whole                                       |           |             |
| compressed  | whole + reading + (n - 1) * (kept + tail)       |           |             |
| incremental | n * described + kept + segment + step           | see below | see below   |
|             | + (n - 1) * (kept + tail)                       |           |             |
| offloaded   | n * (slots + window); if that is whole or more: | see below | n * whole   |
|             | whole + (n - 1) * (slots + window)              |           |             |

`whole` is p + a in blocks. A compressed context is kept in `kept` blocks, a part of its prompt's
whole blocks, and `tail` blocks for all tokens after these. One context at a time is whole, and the
tokens that read it again are in `reading` blocks (docs/compression.md). Incremental compression
never holds a whole context: one at a time is longer than its kept blocks by `segment` and `step`.
It needs a calibration file. For the store, `described` further blocks describe the kept ones
(`headrace_decode.compression.engine.stored_context`). If the cache is then smaller than `whole`,
host memory holds one whole context, for requests that refuse the technique. `slots` and `window`
are those of `headrace_decode.attention.offload.footprint`. A context that is longer than the cache
is computed within the window. A context that fits arrives as a whole, and leaves when the next one
comes. Beside the cache of an engine with host memory are the summaries of all pages, and one layer
of one context, in which its KV is put in order.

A step in which all requests answer reads the model's weights and the KV that they attend to: all KV
in the cache, or, of an offloaded context, the selected pages and the summaries of all. On CPUs
these reads take the time of the step (docs/compression.md), so a target for the inter-token latency
limits `read`.

Each option takes the largest keep ratio that fits. The option with the least error (KL) is chosen.
KL was measured at some ratios. Between them it is interpolated, linearly in logarithms. Below the
smallest measured ratio there is no prediction.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from headrace.model.facts import ModelFacts
from headrace.model.registry import ModelError
from headrace_decode.attention.offload.footprint import footprint
from headrace_decode.attention.page_counts import MIN_TOKENS, selected_page_count
from headrace_decode.compression.engine.compression_job import (
    EARLIER_TOKENS,
    MIN_FREED,
    SEGMENT_TOKENS,
    retained_blocks,
)
from headrace_decode.compression.engine.stored_context import RetainedLayout as StoredContextLayout
from headrace_decode.compression.scores import LEAD_TOKENS, PART_TOKENS
from headrace_decode.sparse.basis import COORDINATES
from headrace_decode.sparse.summaries import RANK_BESIDE
from headrace_decode.sparse.summary_layout import SummaryLayout

COMPRESSION_KL = {0.5: 0.0004, 0.25: 0.0054, 0.12: 0.037}
"""Mean KL of a token in nats by keep ratio, if an engine reads contexts again to choose what it
keeps: SmolLM2-135M, six contexts of 3,000 tokens (docs/compression.md, `python -m
benchmarks.longcontext`)."""
BLOCK_TOKENS = 128
"""Tokens of a block in engines on CPUs. Only these engines drop or offload KV."""
STEP_TOKENS = 128
"""Maximum number of prompt tokens that one step computes of an offloaded context."""
INCREMENTAL_STEP_TOKENS = 512
"""Maximum number of prompt tokens that one step computes in incremental compression."""
STEPS_UNDER_WAY = 2
NULL_BLOCK = 1
"""Number of blocks that vLLM gives to no request."""
SUM_BYTES = 8
"""Bytes of a page's sum in each layer."""
NEEDS_CALIBRATION = "needs techniques.{0}.calibration, a file of `headrace lab calibrate {0}`"
GIB = 1 << 30

Curve = Mapping[float, float]
"""Mean KL of a token in nats, by keep ratio."""


@dataclass(frozen=True)
class KvBudgetRequest:
    """Requirements of an engine: the contexts to hold, and the memory for them.

    Attributes:
        budget_bytes: for KV, and for the data beside it by which pages are selected. host_bytes:
            for offloaded KV.
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


class KvBudgetSizes(NamedTuple):
    """Bytes that an option needs: `cache` in the engine's KV cache, `beside` it for choosing,
    `host` in host memory. `read`: bytes of them that a step reads in which all contexts answer at
    their full length."""

    cache: int
    read: int
    beside: int = 0
    host: int = 0

    def lacks(self, request: KvBudgetRequest) -> str:
        """Return the requirements that are not met, in words; empty if all are."""
        found = []
        if self.cache + self.beside > request.budget_bytes:
            found.append(f"{(self.cache + self.beside) / GIB:.3g} GiB")
        if self.host > request.host_bytes:
            found.append(f"{self.host / GIB:.3g} GiB of host memory")
        needs = f"needs {' and '.join(found)}" if found else ""
        if request.read_bytes is None or self.read <= request.read_bytes:
            return needs
        reads = f"reads {self.read / GIB:.3g} GiB a step, over {request.read_bytes / GIB:.3g}"
        return "; ".join(filter(None, (needs, reads)))


@dataclass(frozen=True)
class KvBudgetOption:
    """A way to hold the contexts, with the largest keep ratio that fits.

    Attributes:
        name: "full", "compressed", "incremental" or "offloaded".
        keep_ratio: part of the KV that is kept, or attended to; the smallest one if none fits.
        kl: expected mean KL of a token in nats; None if no ratio is possible.
        why_not: why it cannot be taken; empty if it can.
    """

    name: str
    keep_ratio: float
    kl: float | None
    sizes: KvBudgetSizes
    why_not: str = ""


@dataclass(frozen=True)
class KvBudgetPlan:
    """Requirements of an engine, and each option for them, in the order of the table above."""

    request: KvBudgetRequest
    options: list[KvBudgetOption]

    @property
    def chosen(self) -> KvBudgetOption:
        """The possible option with the least error.

        Raises:
            ModelError: no option is possible; the text says what each one lacks.
        """
        possible = [option for option in self.options if not option.why_not]
        if not possible:
            lacks = "; ".join(f"{option.name}: {option.why_not}" for option in self.options)
            raise ModelError(f"nothing keeps to {self.request.budget_bytes / GIB:.3g} GiB: {lacks}")
        return min(possible, key=lambda option: option.kl or 0.0)


def kl_at(curve: Curve, keep_ratio: float) -> float:
    """Return the KL at a keep ratio.

    Between two measured ratios it is interpolated, linearly in logarithms. Above all of them it is
    the KL of the largest.

    Raises:
        ValueError: the ratio is below the smallest one that was measured.
    """
    keep_ratios = sorted(curve)
    if keep_ratio < keep_ratios[0]:
        raise ValueError(f"{keep_ratio:g} is below {keep_ratios[0]:g}, the smallest measured ratio")
    for low, high in pairwise(keep_ratios):
        if keep_ratio <= high:
            part = math.log(keep_ratio / low) / math.log(high / low)
            return float(curve[low] ** (1 - part) * curve[high] ** part)
    return curve[keep_ratios[-1]]


def plan_kv_budget(
    facts: ModelFacts,
    request: KvBudgetRequest,
    sparse_kl: Curve | None = None,
    page_tokens: int = 32,
    refused: Mapping[str, str] | None = None,
    compression_kl: Curve | None = None,
) -> KvBudgetPlan:
    """Return all options to hold the contexts; `KvBudgetPlan.chosen` is the best one.

    Args:
        facts: of the model; `dtype_bytes` as the engine keeps KV.
        sparse_kl: of the model, from `headrace lab calibrate sparse`. Without it nothing is
            offloaded.
        page_tokens: tokens of a page, which sparse attention selects as a whole.
        refused: why the engine cannot take an option, by the name of the option.
        compression_kl: of the model, from `headrace lab calibrate compression`. Without it
            compression is not incremental, and contexts are read again (`COMPRESSION_KL`).
    """
    block_bytes = BLOCK_TOKENS * facts.kv_bytes_per_token
    calibrated = bool(compression_kl)
    compression_kl = compression_kl or COMPRESSION_KL

    def whole(_: float) -> KvBudgetSizes:
        blocks = request.contexts * _blocks(request.context_tokens)
        return KvBudgetSizes((NULL_BLOCK + blocks) * block_bytes, blocks * block_bytes)

    def compressed(keep_ratio: float) -> KvBudgetSizes:
        held = request.contexts * sum(_kept(request, keep_ratio))
        return KvBudgetSizes(
            (NULL_BLOCK + compressed_blocks(request, keep_ratio)) * block_bytes, held * block_bytes
        )

    def incremental(keep_ratio: float) -> KvBudgetSizes:
        return _incremental(facts, request, keep_ratio, page_tokens)

    def offloaded(keep_ratio: float) -> KvBudgetSizes | None:
        return _offloaded(facts, request, keep_ratio, page_tokens)

    curves_and_sizes: dict[str, tuple[Curve, Callable[[float], KvBudgetSizes | None]]] = {
        "full": ({1.0: 0.0}, whole),
        "compressed": (compression_kl, compressed),
        "incremental": (compression_kl, incremental),
        "offloaded": (sparse_kl or {}, offloaded),
    }
    too_short = _too_short(request, min(compression_kl))
    none = {
        "compressed": too_short,
        "incremental": too_short if calibrated else NEEDS_CALIBRATION.format("compression"),
        "offloaded": "" if sparse_kl else NEEDS_CALIBRATION.format("sparse"),
    }
    none |= {name: why for name, why in (refused or {}).items() if why}
    return KvBudgetPlan(
        request,
        [
            KvBudgetOption(name, 0.0, None, KvBudgetSizes(0, 0), none[name])
            if none.get(name)
            else _fitting(name, curve, request, sizes)
            for name, (curve, sizes) in curves_and_sizes.items()
        ],
    )


def compressed_blocks(request: KvBudgetRequest, keep_ratio: float) -> int:
    """Return the blocks of a cache in which all contexts are served at once. Contexts are
    compressed one after the other, so at most one is whole
    (`python -m benchmarks.longcontext.dropping`)."""
    reading = _blocks(EARLIER_TOKENS + LEAD_TOKENS + PART_TOKENS + 1)
    return (
        _blocks(request.context_tokens)
        + reading
        + (request.contexts - 1) * sum(_kept(request, keep_ratio))
    )


def incremental_blocks(request: KvBudgetRequest, keep_ratio: float) -> int:
    """Return the blocks of a cache in which all contexts are served at once, and compressed
    incrementally one after the other."""
    kept, tail = _kept(request, keep_ratio)
    longer = _blocks(SEGMENT_TOKENS) + _blocks(INCREMENTAL_STEP_TOKENS)
    return kept + max(tail, longer) + (request.contexts - 1) * (kept + tail)


def _kept(request: KvBudgetRequest, keep_ratio: float) -> tuple[int, int]:
    """Return the blocks that a context is kept in: a part of its prompt's, and all after these."""
    context = request.context_tokens - request.answer_tokens
    tail = _blocks(context % BLOCK_TOKENS + request.answer_tokens)
    return retained_blocks(context // BLOCK_TOKENS, keep_ratio), tail


def _too_short(request: KvBudgetRequest, min_keep_ratio: float) -> str:
    """Return why compression frees nothing of such contexts; empty if it frees something."""
    context = request.context_tokens - request.answer_tokens
    blocks = context // BLOCK_TOKENS
    freed = blocks - retained_blocks(blocks, min_keep_ratio)
    return "" if freed >= MIN_FREED else f"a prompt of {context} tokens is too short to drop from"


def _offloaded(
    facts: ModelFacts, request: KvBudgetRequest, keep_ratio: float, page_tokens: int
) -> KvBudgetSizes | None:
    """Return the sizes of offloaded contexts; None where no row would select pages."""
    chosen = selected_page_count(request.context_tokens, page_tokens, keep_ratio)
    if chosen is None:
        return None
    step_tokens = STEPS_UNDER_WAY * STEP_TOKENS
    one = footprint(request.context_tokens, chosen, page_tokens, BLOCK_TOKENS, step_tokens)
    cache, host = request.contexts * one.blocks, request.contexts * one.host
    if cache >= one.host:
        cache += one.host - one.blocks
    chosen_bytes = chosen * page_tokens * facts.kv_bytes_per_token
    pages = _blocks(request.context_tokens) * BLOCK_TOKENS // page_tokens
    read = request.contexts * (chosen_bytes + _summaries(facts, pages, page_tokens))
    return _with_host(facts, cache + NULL_BLOCK, host, one.host, page_tokens, read)


def _incremental(
    facts: ModelFacts, request: KvBudgetRequest, keep_ratio: float, page_tokens: int
) -> KvBudgetSizes:
    whole, cache = _blocks(request.context_tokens), incremental_blocks(request, keep_ratio)
    block_bytes = BLOCK_TOKENS * facts.kv_bytes_per_token
    layout = StoredContextLayout(
        facts.kv_layers, facts.kv_heads, page_tokens, BLOCK_TOKENS, block_bytes
    )
    cache += request.contexts * layout.description_blocks_for(_kept(request, keep_ratio)[0])
    read = request.contexts * sum(_kept(request, keep_ratio)) * block_bytes
    if cache >= whole:
        return KvBudgetSizes((cache + NULL_BLOCK) * block_bytes, read)
    return _with_host(facts, cache + NULL_BLOCK, whole, whole, page_tokens, read)


def _with_host(
    facts: ModelFacts, cache: int, host: int, whole: int, page_tokens: int, read: int
) -> KvBudgetSizes:
    """Return the sizes of an engine with `cache` blocks, and `host` blocks in host memory. Its
    longest request has `whole` blocks."""
    beside = _summaries(facts, (cache + host) * BLOCK_TOKENS // page_tokens, page_tokens)
    block_bytes = BLOCK_TOKENS * facts.kv_bytes_per_token
    beside += whole * block_bytes // facts.kv_layers
    return KvBudgetSizes(cache * block_bytes, read, beside, host * block_bytes)


def _summaries(facts: ModelFacts, pages: int, page_tokens: int) -> int:
    """Return the bytes of the summaries of this many pages."""
    layout = SummaryLayout(page_tokens, facts.head_dim, RANK_BESIDE, COORDINATES)
    return pages * facts.kv_layers * (facts.kv_heads * layout.nbytes + SUM_BYTES)


def _fitting(
    name: str,
    curve: Curve,
    request: KvBudgetRequest,
    sizes: Callable[[float], KvBudgetSizes | None],
) -> KvBudgetOption:
    """Return the option with the largest keep ratio, in hundredths, that fits; else the smallest.

    Args:
        sizes: returns the sizes at a ratio; None where it is not possible.
    """
    minimum, maximum = (round(100 * keep_ratio) for keep_ratio in (min(curve), max(curve)))
    short = f"only contexts of more than {MIN_TOKENS} tokens are offloaded"
    last = KvBudgetOption(name, 0.0, None, KvBudgetSizes(0, 0), short)
    for keep_ratio in (hundredths / 100 for hundredths in range(maximum, minimum - 1, -1)):
        needed = sizes(keep_ratio)
        if needed is None:
            continue
        lacks = needed.lacks(request)
        last = KvBudgetOption(name, keep_ratio, kl_at(curve, keep_ratio), needed, lacks)
        if not lacks:
            break
    return last


def _blocks(tokens: int) -> int:
    return math.ceil(tokens / BLOCK_TOKENS)
