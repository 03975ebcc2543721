"""Decode attention of offloaded rows: pages in host memory beside pages in the cache.

Heads as in Llama 3 8B, 10 % of the pages chosen, layers one after another. A step scores, chooses,
brings pages into the slots and attends. Arms: all KV is in the cache; all chosen pages have slots;
a tenth of them lost theirs; none has one. A plain copy of pinned memory is the physical limit, for
fetches and for the copies of whole contexts that staged rows need. Keys are random: the time does
not depend on which pages are chosen.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.parts import Report
from benchmarks.gpu.timing import DEVICE, empty_cache, milliseconds
from headrace_decode.attention.offload.footprint import SLOTS
from headrace_decode.attention.page_counts import MIN_TOKENS, page_count, selected_page_count
from headrace_decode.sparse.basis import COORDINATES, Basis
from headrace_decode.sparse.engine.cuda_step import CudaLayer, CudaStep, DuePages
from headrace_decode.sparse.engine.sparse_rows import RowPlan
from headrace_decode.sparse.kernels.cache import HeadCache
from headrace_decode.sparse.kernels.residency import WORD, copy_pages
from headrace_decode.sparse.kernels.summaries import DeviceSummaries
from headrace_decode.sparse.offload.device_memory import DeviceTieredMemory
from headrace_decode.sparse.offload.device_rows import OffloadedStep
from headrace_decode.sparse.offload.host_pool import HostPool
from headrace_decode.sparse.offload.offloaded_requests import OffloadedPlan
from headrace_decode.sparse.offload.pinned_memory import allocate_pinned
from headrace_engine.vllm.attention.paged_kernels import triton_attention

SHARE, PAGE = 0.1, 32
LOST = 10
"""One of so many pages loses its slot in the arm "a tenth missed"."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of the measurement; the context in tokens."""

    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    layers: int = 4
    context: int = 131072
    rows: tuple[int, ...] = (1, 4)
    turns: int = 20


SMALL = Sizes(heads=4, kv_heads=2, dim=32, layers=2, context=MIN_TOKENS, rows=(1,), turns=1)
ARMS = "in the cache", "all found", "a tenth missed", "none found"


class Rows:
    """Rows whose contexts are in the cache and in host memory, and the same step over each."""

    def __init__(self, rows: int, sizes: Sizes) -> None:
        n, kv_heads, dim = page_count(sizes.context, PAGE), sizes.kv_heads, sizes.dim
        chosen = selected_page_count(sizes.context, PAGE, SHARE)
        assert chosen is not None
        slots, self.layers, self._scale = int(SLOTS * chosen), sizes.layers, dim**-0.5
        shape = (rows * (n + slots), kv_heads, PAGE, 2 * dim)
        caches = [
            torch.randn(shape, dtype=torch.bfloat16, device=DEVICE) for _ in range(sizes.layers)
        ]
        draw = torch.Generator().manual_seed(0)
        shapes = (kv_heads, dim), (kv_heads, dim, COORDINATES), (kv_heads, COORDINATES, dim)
        basis = Basis(*(torch.randn(each, generator=draw).numpy() for each in shapes))
        capacity = shape[0] + rows * n
        summaries = [DeviceSummaries(capacity, PAGE, basis, DEVICE) for _ in caches]
        self.page_bytes = caches[0][0].nbytes
        pinned = allocate_pinned(sizes.layers * rows * n * self.page_bytes, torch.device(DEVICE))
        self.memory = DeviceTieredMemory(caches, summaries, HostPool(rows * n, 1), pinned, n)
        parts = enumerate(zip(summaries, caches, strict=True))
        self._layers = [CudaLayer(s, HeadCache.of(cache), at) for at, (s, cache) in parts]
        blocks = torch.randperm(rows * n, generator=draw).view(rows, n).int().to(DEVICE)
        for each in self._layers:
            each.summaries.refresh(each.cache, blocks.flatten().long())
        full = (sizes.context - 1) // PAGE
        fill = sizes.context - full * PAGE
        plans = [RowPlan(row, full, fill, chosen) for row in range(rows)]
        starts = np.arange(rows + 1)
        self._inside = CudaStep(plans, DuePages(), starts, blocks, triton_attention)
        held = []
        for row, plan in enumerate(plans):
            first = rows * n + row * slots
            one = self.memory.hold(range(first, first + slots))
            _, pages = one.save_up_to(full * PAGE, blocks[row].tolist())
            self.memory.save(blocks[row, :full].cpu().numpy().astype(np.int64), pages)
            held.append(OffloadedPlan(plan, one))
        self._offloaded = OffloadedStep(held, self.memory, starts, blocks, triton_attention)
        self._query = torch.randn((rows, sizes.heads, dim), dtype=torch.bfloat16, device=DEVICE)
        self._output = torch.empty_like(self._query)
        self._pages = torch.arange(full, device=DEVICE)

    def inside(self) -> None:
        """A step over the cache."""
        for each in self._layers:
            self._inside.attend(each, self._query, self._output, self._scale)

    def offloaded(self) -> None:
        """A step over host memory."""
        for each in self._layers:
            self._offloaded.fetch(each, self._query, self._scale)
            self._offloaded.attend(each, self._query, self._output, self._scale)

    def lose(self, every: int, first: int) -> None:
        """Have pages lose their slots: each n-th, from one on."""
        for each in self.memory.residency:
            each.slot_of[:, first::every] = -1

    def stage(self) -> None:
        """Copy a whole context of one layer into a buffer."""
        host, buffer = self.memory.host_pages.layer(0), self.memory.buffer_pages[0]
        copy_pages(host, self._pages, buffer, self._pages, self.memory.layout)

    @property
    def staged_bytes(self) -> int:
        return len(self._pages) * self.memory.layout.words * WORD


def measured(dry: bool, report: Report) -> dict[str, Any]:
    """Return the milliseconds a layer and GB/s, by number of rows."""
    sizes, found = SMALL if dry else Sizes(), dict[str, Any]()
    for rows in sizes.rows:
        found[str(rows)] = _of(rows, sizes)
        report(found)
        empty_cache()
    return found


def _of(count: int, sizes: Sizes) -> dict[str, Any]:
    rows = Rows(count, sizes)
    prepare: dict[str, Callable[[int], None]] = {
        "a tenth missed": lambda turn: rows.lose(LOST, turn % LOST),
        "none found": lambda turn: rows.lose(1, 0),
    }
    times: dict[str, list[float]] = {name: [] for name in ARMS}
    fetched, missed = 0, 0
    for turn in range(-1, sizes.turns):
        for name in ARMS:
            prepare.get(name, lambda turn: None)(turn)
            before = rows.memory.counts.tolist()
            took_ms = milliseconds(rows.inside if name == ARMS[0] else rows.offloaded)
            chosen, missing = (
                after - each
                for after, each in zip(rows.memory.counts.tolist(), before, strict=True)
            )
            if turn < 0:
                continue  # kernels are compiled
            times[name].append(took_ms / sizes.layers)
            if name == "none found":
                fetched = missing * rows.page_bytes // sizes.kv_heads
            if name == "a tenth missed":
                missed = missing / max(chosen, 1)
    ms = {name: statistics.median(each) for name, each in times.items()}
    plain = {"fetched": _copy_ms(fetched), "staged": _copy_ms(rows.staged_bytes)}
    staged = statistics.median(milliseconds(rows.stage) for _ in range(1 + sizes.turns))
    extra = sizes.layers * (ms["none found"] - ms["all found"])
    return {
        "ms_per_layer": ms,
        "missed": missed,
        "fetched_gbps": fetched / max(extra, 1e-6) / 1e6,
        "staged_gbps": rows.staged_bytes / staged / 1e6,
        "plain_gbps": rows.staged_bytes / plain["staged"] / 1e6,
        "fetch_vs_plain_copy": plain["fetched"] / max(extra, 1e-6),
        "stage_vs_plain_copy": plain["staged"] / staged,
    }


def _copy_ms(size_bytes: int) -> float:
    """Return the milliseconds of one copy of pinned memory to the card."""
    source = allocate_pinned(max(size_bytes, 1), torch.device(DEVICE))
    target = torch.empty_like(source, device=DEVICE)

    def copy() -> None:
        target.copy_(source, non_blocking=True)

    return statistics.median(milliseconds(copy) for _ in range(5))


def figures(found: Mapping[str, Any]) -> dict[str, float]:
    """Return, by number of rows, how much longer a step takes than over the cache, and the speed of
    copies over that of a plain one."""
    told = {}
    for rows, one in found.items():
        ms = one["ms_per_layer"]
        told[f"offload_step_vs_in_cache_rows_{rows}"] = ms["a tenth missed"] / ms["in the cache"]
        told[f"offload_fetch_vs_plain_copy_rows_{rows}"] = one["fetch_vs_plain_copy"]
        told[f"offload_stage_vs_plain_copy_rows_{rows}"] = one["stage_vs_plain_copy"]
    return told


def markdown(found: Mapping[str, Any]) -> str:
    """Return a table of the measurements."""
    head = ["rows", *(f"{name}, ms a layer" for name in ARMS), "missed"]
    head += ["fetched, GB/s", "staged, GB/s", "plain copy, GB/s"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---:|" * len(head)]
    for rows, one in found.items():
        times = [f"{one['ms_per_layer'][name]:.3f}" for name in ARMS]
        rates = [f"{one[name]:.1f}" for name in ("fetched_gbps", "staged_gbps", "plain_gbps")]
        lines.append("| " + " | ".join([rows, *times, f"{one['missed']:.2f}", *rates]) + " |")
    return "\n".join(lines)
