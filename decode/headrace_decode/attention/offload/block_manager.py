"""Manager of KV blocks that takes cold blocks of offloaded requests, and blocks of dropped
contexts, back into vLLM's pool.

It is registered for its kinds of KV cache with vLLM (`OffloadSpec`, `CompressionSpec`). It works
like vLLM's manager for sliding windows: a block that is not needed any more is replaced by the null
block in the request's table. Blocks that hold a request's working set, or the retained KV of its
context, are not in the table but in a list of slots. The table therefore holds only KV as it was
computed, which may be cached as a prefix like any other.

Other requests are managed by vLLM's code for full attention.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from headrace_decode.attention.offload.footprint import Footprint, footprint
from headrace_decode.attention.offload.ledger import Ledger, cold_blocks
from headrace_engine.vllm.scheduling import (
    BlockHash,
    FullAttentionManager,
    FullAttentionSpec,
    make_block_hash_with_group_id,
    name_block,
    register_kv_cache_spec,
)


class OffloadBlockManager(FullAttentionManager):  # type: ignore[misc]
    """Manager of the only cache group.

    Attributes:
        ledger: record of offloaded requests; the scheduler sets it.
        windows: by request that drops blocks while its prompt is computed: maximum blocks that it
            holds until then; the scheduler updates it.
    """

    def __init__(self, kv_cache_spec: Any, **kwargs: Any) -> None:
        super().__init__(kv_cache_spec, **kwargs)
        self.ledger = Ledger()
        self.windows: dict[str, int] = {}
        self._slots: dict[str, list[Any]] = {}

    def slots(self, request_id: str) -> list[int]:
        """Return a request's slots: the blocks of an admitted request's working set, or those that
        a dropped context is kept in."""
        return [block.block_id for block in self._slots[request_id]]

    def held(self, request_id: str) -> int:
        """Return the number of blocks of the pool that a request holds."""
        table = self.req_to_blocks.get(request_id, ())
        slots = self._slots.get(request_id, ())
        return len(slots) + sum(not block.is_null for block in table)

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: Sequence[Any],
        total_computed_tokens: int,
        num_local_computed_tokens: int,
        num_tokens_main_model: int,
        apply_admission_cap: bool = False,
        prefill_end: int = 0,
    ) -> int:
        """Return the number of blocks to allocate like vLLM.

        In total, an offloaded request needs its footprint, and one that drops blocks its window.
        """
        needed: int = super().get_num_blocks_to_allocate(
            *(request_id, num_tokens, new_computed_blocks, total_computed_tokens),
            *(num_local_computed_tokens, num_tokens_main_model, apply_admission_cap),
            prefill_end,
        )
        planned = self.ledger.planned(request_id)
        if planned is None:
            window = self.windows.get(request_id)
            if window is None or not apply_admission_cap:
                return needed
            return min(needed, max(0, window - self.held(request_id)))
        if apply_admission_cap:
            needed = min(needed, planned.window)
        if self.ledger.is_admitted(request_id):
            return needed
        if self.ledger.has_room(planned):
            return needed + planned.slots
        return int(self.block_pool.num_gpu_blocks) + 1  # it waits for host memory

    def allocate_new_blocks(
        self, request_id: str, num_tokens: int, num_tokens_main_model: int
    ) -> list[Any]:
        """Allocate blocks like vLLM, and the slots of an offloaded request that is admitted."""
        planned = self.ledger.planned(request_id)
        if planned is not None and not self.ledger.is_admitted(request_id):
            self.ledger.admit(request_id)
            self._slots[request_id] = self.block_pool.get_new_blocks(planned.slots)
        found: list[Any] = super().allocate_new_blocks(
            request_id, num_tokens, num_tokens_main_model
        )
        return found

    def remove_skipped_blocks(
        self,
        request_id: str,
        processed_computed_tokens: int,
        num_prompt_tokens: int | None = None,
    ) -> None:
        """Give cold blocks back to the pool."""
        last = self.ledger.cold_blocks(request_id, processed_computed_tokens, self.block_size)
        self._remove_blocks_in_range(request_id, 0, last)

    def may_offload(self, request_id: str, planned: Footprint, processed_tokens: int) -> bool:
        """Return whether there is room to offload a request that has all of its KV in the cache;
        arguments as for `offload`."""
        last = cold_blocks(processed_tokens, self.block_size)
        return self.ledger.has_room(planned) and self.may_drop(request_id, planned.slots, last)

    def offload(self, request_id: str, planned: Footprint, processed_tokens: int) -> None:
        """Offload a request that was served from the cache so far, and give its cold blocks back.

        Args:
            planned: its footprint.
            processed_tokens: number of its tokens whose KV the worker copies before anything is
                overwritten.
        """
        self.ledger.plan(request_id, planned)
        self.ledger.admit(request_id)
        self.ledger.worker_knows(request_id, len(self.req_to_blocks[request_id]))
        last = cold_blocks(processed_tokens, self.block_size)
        self.drop(request_id, planned.slots, last)

    def drop(self, request_id: str, kept: int, last: int) -> list[int]:
        """Give the first blocks of a request back, and its slots; allocate and return new slots,
        which may be some of these blocks.

        Args:
            kept: number of new slots. last: number of first blocks to give back.
        """
        self._remove_blocks_in_range(request_id, 0, last)
        self.block_pool.free_blocks(self._slots.pop(request_id, []))
        self._slots[request_id] = self.block_pool.get_new_blocks(kept)
        return self.slots(request_id)

    def cache_slots(self, request_id: str, number: int) -> None:
        """Make a request's slots findable under this number, until other requests take them."""
        slots = self._slots[request_id]
        for name, block in zip(self._names(number, len(slots)), slots, strict=True):
            name_block(self.block_pool, name, block, self.block_size)

    def has_slots(self, number: int, held: int) -> bool:
        """Return whether all slots under this number, `held` of them, can still be found."""
        return all(block is not None for block in self._found(number, held))

    def assign_empty_slots(self, request_id: str, held: int, blocks: int) -> None:
        """Give a waiting request slots in place of its first blocks. The connector fills them.

        Args:
            held: number of slots. blocks: number of first blocks that they replace.
        """
        self._slots[request_id] = self.block_pool.get_new_blocks(held)
        self.req_to_blocks[request_id] = [self._null_block] * blocks

    def assign_cached_slots(self, request_id: str, number: int, held: int, blocks: int) -> None:
        """Give a waiting request the slots under this number in place of its first blocks.

        Args:
            held: number of slots. blocks: number of first blocks that they replace.
        """
        found = list(self._found(number, held))
        self.block_pool.touch(found)
        self._slots[request_id] = found
        self.req_to_blocks[request_id] = [self._null_block] * blocks

    def _found(self, number: int, held: int) -> Iterator[Any]:
        return map(
            self.block_pool.cached_block_hash_to_block.get_one_block, self._names(number, held)
        )

    def _names(self, number: int, held: int) -> Iterator[Any]:
        for block in range(held):
            name = BlockHash(b"kept %d, block %d" % (number, block))
            yield make_block_hash_with_group_id(name, self.kv_cache_group_id)

    def may_drop(self, request_id: str, kept: int, last: int) -> bool:
        """Return whether `drop` would find enough free blocks. Blocks that it gives back count if
        no other request holds them."""
        go = [*self.req_to_blocks[request_id][:last], *self._slots.get(request_id, ())]
        alone = sum(block.ref_cnt == 1 and not block.is_null for block in go)
        return kept <= int(self.block_pool.get_num_free_blocks()) + alone

    def cache_blocks(self, request: Any, num_tokens: int, *args: Any, **kwargs: Any) -> None:
        """Cache blocks like vLLM, unless the request has fewer hashes than full blocks."""
        if len(request.block_hashes) >= num_tokens // self.block_size:
            super().cache_blocks(request, num_tokens, *args, **kwargs)

    def pop_blocks_for_free(self, request_id: str) -> list[Any]:
        """Remove and return a request's blocks like vLLM, with its slots."""
        self.ledger.leave(request_id)
        return [*self._slots.pop(request_id, []), *super().pop_blocks_for_free(request_id)]


@register_kv_cache_spec(manager_class=OffloadBlockManager, uniform_type_base_spec=FullAttentionSpec)
@dataclass(frozen=True, kw_only=True)
class CompressionSpec(FullAttentionSpec):  # type: ignore[misc]
    """Full attention of requests that may drop blocks."""


@register_kv_cache_spec(manager_class=OffloadBlockManager, uniform_type_base_spec=FullAttentionSpec)
@dataclass(frozen=True, kw_only=True)
class OffloadSpec(FullAttentionSpec):  # type: ignore[misc]
    """Full attention whose cold blocks may leave the cache."""

    def max_memory_usage_bytes(self, vllm_config: Any) -> int:
        """Return the bytes that a request needs at most, like vLLM; no more than its footprint,
        which suffices for any length."""
        whole: int = super().max_memory_usage_bytes(vllm_config)
        longest = vllm_config.model_config.max_model_len
        in_flight = vllm_config.max_in_flight_tokens
        smallest = footprint(longest, None, self.block_size, self.block_size, in_flight)
        return min(whole, smallest.blocks * self.page_size_bytes)
