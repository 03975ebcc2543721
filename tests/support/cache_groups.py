"""vLLM's own manager of KV blocks over several cache groups, and its events on their way to a
gateway's index."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import torch
from vllm.distributed import kv_events
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
    get_kv_cache_spec_kind,
)
from vllm.v1.request import Request

from headrace.router.blocks.block_index import BlockIndex
from headrace.router.blocks.kv_events import KvEventProcessor
from headrace_engine.kv_groups import hit_groups
from headrace_engine.reporting.engine_events import HeldBlocks
from headrace_kvstore.identity.prompt_hash import keys_of
from headrace_kvstore.protocol.events import AllBlocksCleared, EventBatch, batches

BLOCK = 4
LONGEST = 4096
SIZES: dict[str, Any] = dict(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32)
FULL = FullAttentionSpec(**SIZES)
STATE = MambaSpec(
    block_size=BLOCK, shapes=((4, 16),), dtypes=(torch.float32,), mamba_cache_mode="align"
)


def sliding(window: int) -> SlidingWindowSpec:
    return SlidingWindowSpec(**SIZES, sliding_window=window)


def metadata(groups: Sequence[Any]) -> list[dict[str, Any]]:
    """As `EngineCore.get_kv_cache_group_metadata`."""
    return [
        {
            "group_idx": number,
            "kind": get_kv_cache_spec_kind(spec).value,
            "block_size": spec.block_size,
            "sliding_window": getattr(spec, "sliding_window", None),
        }
        for number, spec in enumerate(groups)
    ]


class Managed:
    """vLLM's manager, and a schedule of steps.

    Args:
        groups: specs of its cache groups. blocks: of its pool. in_flight: as for vLLM's manager.
    """

    def __init__(self, groups: Sequence[Any], blocks: int, in_flight: int = LONGEST) -> None:
        init_none_hash(sha256_cbor)
        register_all_kvcache_specs(None)
        config = KVCacheConfig(
            blocks, [], [KVCacheGroupSpec([f"l{n}"], spec) for n, spec in enumerate(groups)]
        )
        self.groups, self.blocks = groups, blocks
        self.manager = KVCacheManager(
            *(config, LONGEST, BLOCK, BLOCK, in_flight), enable_kv_cache_events=True
        )
        self.pool = self.manager.block_pool
        self.running: dict[str, Request] = {}
        self._has_state = STATE in groups
        self._count = 0

    def request(self, tokens: Sequence[int]) -> Request:
        self._count += 1
        hasher = get_request_block_hasher(BLOCK, sha256_cbor)
        params = SamplingParams(max_tokens=64)
        return Request(f"r{self._count}", list(tokens), params, None, block_hasher=hasher)

    def hit(self, request: Request) -> int:
        """Tokens of a new request that vLLM finds in its cache."""
        return int(self.manager.get_computed_blocks(request)[1])

    def begin(self, tokens: Sequence[int], chunk: int) -> Request | None:
        """Compute the first chunk of a request; None without room."""
        request = self.request(tokens)
        found, hit, _ = self.manager.get_computed_blocks(request)
        count = self._chunk(request, hit, chunk)
        self.manager.new_step_starts()
        if self.manager.allocate_slots(request, count, hit, found) is None:
            self.manager.free(request)
            return None
        request.num_computed_tokens = hit + count
        self.running[request.request_id] = request
        return request

    def step(self, request: Request, chunk: int, token: int = 7) -> bool:
        """Compute the next chunk of a request, or its next token; False without room."""
        if request.num_computed_tokens == request.num_tokens:
            request.append_output_token_ids([token])
        count = self._chunk(request, request.num_computed_tokens, chunk)
        self.manager.new_step_starts()
        if self.manager.allocate_slots(request, count) is None:
            return False
        request.num_computed_tokens += count
        return True

    def _chunk(self, request: Request, start: int, chunk: int) -> int:
        """Tokens of the next chunk; with recurrent layers it ends as vLLM's scheduler cuts it."""
        end = min(request.num_tokens, start + max(chunk, BLOCK if self._has_state else 1))
        last = (request.num_tokens - 1) // BLOCK * BLOCK
        if self._has_state and start < last:
            end = min(last, end // BLOCK * BLOCK)
        return end - start

    def end(self, request: Request) -> None:
        self.manager.free(self.running.pop(request.request_id))

    def held(self, request: Request) -> int:
        """Blocks of a request in all groups."""
        found = self.manager.get_blocks(request.request_id).blocks
        return sum(not block.is_null for blocks in found for block in blocks)

    def events(self) -> bytes:
        made = kv_events.KVEventBatch(1.0, self.manager.take_events(), 0)
        return bytes(msgspec.msgpack.encode(made))


class Followed:
    """A replica and a gateway that follow an engine's events."""

    def __init__(self, groups: Sequence[Any]) -> None:
        hits = hit_groups(metadata(groups), BLOCK)
        self.held = HeldBlocks(hits)
        self.index = BlockIndex(2**20)
        self._processor = KvEventProcessor(self.index, silent_s=10.0)
        windows = tuple(window.blocks for window in hits.windows)
        self.holder = self._processor.add_source("e", "1", 0.0, windows)
        self._seq = 0
        self._processor.poll(0.0)
        self._processor.on_replay_end("e", "1", 0.0)
        self._publish([[AllBlocksCleared()]])

    def apply(self, payload: bytes) -> None:
        changes = self.held.apply(payload)
        if changes is None:
            self.resync()
        else:
            self._publish(batches(changes))

    def resync(self) -> None:
        """Publish the whole state, as after each 4 MiB of batches."""
        self._publish([[AllBlocksCleared()], *batches(self.held.contents())])

    def hit(self, request: Request) -> int:
        """Tokens of a request that the gateway expects to be found."""
        blocks = request.block_hashes[: (request.num_tokens - 1) // BLOCK]
        return int(self.index.match(keys_of(list(map(bytes, blocks))))[self.holder]) * BLOCK

    def _publish(self, events: Iterable[list[Any]]) -> None:
        for each in events:
            payload = msgspec.msgpack.encode(EventBatch(1.0, each, 0))
            self._processor.on_batch("e", "1", self._seq, payload, 0.0)
            self._seq += 1
