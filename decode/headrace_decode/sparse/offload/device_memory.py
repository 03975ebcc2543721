"""Cache of an engine on a GPU, pinned host memory, and the copies between them.

The scheduler's block is a page. Blocks of a request's working set are its slots. Which page each of
them holds is known on the device alone (`kernels.residency`), so a step waits for nothing that the
host would have to read.

A full page is copied, and summarised, in the computing stream at the end of the step that fills it.
A step's tokens therefore reach the scheduler after its copies are done, and a block that it frees
may be overwritten by anyone.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from headrace_decode.attention.cpu_cache import Ids
from headrace_decode.attention.device_copy import copy_to_device, padded
from headrace_decode.sparse.kernels.cache import HeadCache
from headrace_decode.sparse.kernels.residency import (
    WORD,
    PageLayout,
    PageMemory,
    PageResidency,
    copy_pages,
)
from headrace_decode.sparse.kernels.summaries import DeviceSummaries
from headrace_decode.sparse.offload.host_pool import HostPool
from headrace_decode.sparse.offload.offloaded_request import OffloadedRequest
from headrace_decode.sparse.offload.side_stream import SideStream

BUFFERS = 2
"""Number of buffers that hold a request's pages of one layer: one is filled while the pages in the
other are attended to."""
RESIDENCY_BYTES = {"block": 8, "host_page": 4}
"""Bytes of `PageResidency` for each KV head of a block of the cache and of a page of host
memory."""


class DeviceTieredMemory:
    """Implements `TieredMemory` on a GPU.

    Args:
        caches: cache of each layer.
        summaries: summaries of each layer. Page `u` of host memory is `first_host + u`.
        host: host memory. pinned: its bytes, from `allocate_pinned`.
        max_pages: maximum pages of a request.

    Raises:
        ValueError: the kernels cannot copy pages of this form.

    Attributes:
        layout: order of a page's bytes.
        caches: cache of each layer, by head.
        cache_pages, host_pages: pages of all layers in the cache, and in host memory.
        residency: pages in slots, by layer.
        counts: as for `PageResidency`, of all layers.
        buffers: pages of a request of one layer in order, each like a layer's cache.
        buffer_pages: memory of each of these.
        order: int32 [1, max_pages], block table of a buffer.
        fetching, staging: streams of copies for sparse rows and for staged ones.
        step: number of the step.
    """

    def __init__(
        self,
        caches: Sequence[Tensor],
        summaries: Sequence[DeviceSummaries],
        host: HostPool,
        pinned: Tensor,
        max_pages: int,
    ) -> None:
        first = caches[0]
        device, layers = first.device, len(caches)
        self.host, self.layer_count = host, layers
        self.layout = PageLayout.of(first)
        self.page_tokens, self.first_host = self.layout.tokens, len(first)
        self.caches, self._summaries = [HeadCache.of(each) for each in caches], summaries
        page_bytes = self.layout.words * WORD
        if pinned.numel() != layers * host.pages * page_bytes:
            raise ValueError(f"a page of the KV cache does not have {page_bytes} bytes")
        self._pinned = pinned.view(layers, host.pages, page_bytes)
        self.cache_pages = PageMemory.of(caches, device)
        self.host_pages = PageMemory.of(list(self._pinned), device)
        ints, heads = {"dtype": torch.int32, "device": device}, self.layout.kv_heads
        self._slot_of = torch.full((layers, heads, padded(host.pages)), -1, **ints)
        self._page_in = torch.full((layers, heads, padded(len(first))), -1, **ints)
        self._used_at = torch.zeros((layers, heads, padded(len(first))), **ints)
        self.counts = torch.zeros(2, dtype=torch.int64, device=device)
        parts = zip(self._slot_of, self._page_in, self._used_at, strict=True)
        self.residency = [PageResidency(*each, self.counts) for each in parts]
        shape, strides = (max_pages, *first.shape[1:]), first.stride()[1:]
        page = self.layout.words * WORD // first.element_size()
        self.buffers = [
            torch.empty(max_pages * page, dtype=first.dtype, device=device).as_strided(
                shape, (page, *strides)
            )
            for _ in range(BUFFERS)
        ]
        self.buffer_pages = [PageMemory.of([each], device) for each in self.buffers]
        self.order = torch.arange(max_pages, **ints)[None]
        self.fetching, self.staging = SideStream(device), SideStream(device)
        self.step = 0

    @property
    def host_bytes(self) -> int:
        return self._pinned.numel()

    @property
    def staging_bytes(self) -> int:
        """Bytes of the buffers."""
        return sum(each.nbytes for each in self.buffers)

    def hold(self, slots: Sequence[int]) -> OffloadedRequest:
        """Implement `TieredMemory.hold`."""
        held = OffloadedRequest(self, slots)
        if len(held.slots):
            at = copy_to_device(held.slots, self._page_in.device)
            self._page_in.index_fill_(2, at, -1)
            self._used_at.index_fill_(2, at, 0)
        return held

    def allocate(self, blocks: int) -> Ids:
        """Implement `TieredMemory.allocate`."""
        pages = self.host.allocate(blocks)
        self._slot_of.index_fill_(2, copy_to_device(pages, self._slot_of.device), -1)
        return pages

    def save(self, pages: Ids, host_pages: Ids) -> None:
        """Implement `TieredMemory.save`; make the pages' summaries."""
        from_, to = (copy_to_device(each, self._slot_of.device) for each in (pages, host_pages))
        copy_pages(self.cache_pages, from_, self.host_pages, to, self.layout)
        for summaries, cache in zip(self._summaries, self.caches, strict=True):
            summaries.refresh(cache, from_, to + self.first_host)

    def save_summaries(self, pages: Ids, host_pages: Ids) -> int:
        """Implement `TieredMemory.save_summaries`: `save` makes them all."""
        return len(pages)

    def summarise(self, host_pages: Ids) -> None:
        """Implement `TieredMemory.summarise`.

        Raises:
            RuntimeError: `save` has made no summaries of these pages.
        """
        raise RuntimeError(f"{len(host_pages)} pages of host memory have no summaries")

    def finish(self) -> None:
        """Implement `TieredMemory.finish`."""
        if self.order.device.type == "cuda":
            torch.cuda.current_stream(self.order.device).synchronize()
