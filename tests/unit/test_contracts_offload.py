"""Offload through vLLM's own manager of KV blocks: what it takes, gives back and caches.

No engine. Where vLLM moves, mend `decode/headrace_decode/attention/offload/block_manager.py`.
"""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request

from headrace_decode.attention.offload import block_manager as module
from headrace_decode.attention.offload.block_manager import (
    CompressionSpec,
    OffloadBlockManager,
    OffloadSpec,
)
from headrace_decode.attention.offload.footprint import Footprint
from headrace_decode.attention.offload.ledger import Ledger
from headrace_decode.attention.offload.scheduler import newly_offloaded
from headrace_decode.attention.settings import SparseSettings
from headrace_decode.attention_backend import worker
from headrace_decode.compression.engine.settings import CompressionSettings
from headrace_engine.extensions.scheduler import ExtensibleScheduler
from headrace_engine.vllm.scheduling import final_tokens, replace_as, requests_gone
from tests.support.contracts import assert_takes

MANAGER = module.__file__
BLOCKS, HOST = 21, 100
SPEC = FullAttentionSpec(block_size=128, num_kv_heads=2, head_size=64, dtype=torch.float32)
PLAN = Footprint(slots=4, window=6, host=60)


class Engine:
    """vLLM's manager of one cache group, and what a scheduler does with it for one request."""

    def __init__(self) -> None:
        init_none_hash(sha256)
        config = KVCacheConfig(
            BLOCKS, [], [KVCacheGroupSpec(["layer"], replace_as(SPEC, OffloadSpec))]
        )
        self.kv = KVCacheManager(
            config, max_model_len=8192, scheduler_block_size=128, hash_block_size=128
        )
        [found] = self.kv.coordinator.single_type_managers
        assert isinstance(found, OffloadBlockManager), f"mend {MANAGER}"
        self.manager = found
        self.manager.ledger = Ledger(HOST)

    @property
    def free(self) -> int:
        return int(self.kv.block_pool.get_num_free_blocks())

    def step(self, request: Request, tokens: int, waiting: bool = False) -> dict[str, Any]:
        """Schedule and compute so many tokens; what the worker is told."""
        hits: Any = {}
        if waiting:
            blocks, count, _ = self.kv.get_computed_blocks(request)
            hits = {"new_computed_blocks": blocks, "num_new_computed_tokens": count}
        admits = {"full_sequence_must_fit": waiting, **hits}
        if self.kv.allocate_slots(request, tokens, **admits) is None:
            raise MemoryError
        request.num_computed_tokens += tokens + hits.get("num_new_computed_tokens", 0)
        output = SimpleNamespace(
            finished_req_ids=[], num_scheduled_tokens={request.request_id: tokens}
        )
        return dict(newly_offloaded(self.manager, output, {}).working_sets)

    def table(self, request: Request) -> list[int]:
        return list(self.kv.get_block_ids(request.request_id)[0])


def request(name: str, tokens: int, seed: int = 0) -> Request:
    return Request(
        name,
        [(seed + n) % 1000 for n in range(tokens)],
        SamplingParams(max_tokens=16),
        None,
        block_hasher=get_request_block_hasher(128, sha256),
    )


def test_a_request_longer_than_the_cache_is_computed_in_its_footprint() -> None:
    engine, long = Engine(), request("a", 7000)
    engine.manager.ledger.plan("a", PLAN)
    told = engine.step(long, 256, waiting=True)
    assert len(told["a"]) == 4 and not set(told["a"]) & set(engine.table(long))
    while long.num_computed_tokens < 6900:
        assert engine.step(long, 256) == {}
        assert engine.free >= BLOCKS - 1 - PLAN.blocks
    table = engine.table(long)
    last = long.num_computed_tokens // 128 - 4
    assert table[:last] == [0] * last, "null blocks stand for what is cold"
    assert 0 not in table[last + 1 :], "the worker still reads these"
    engine.kv.free(long)
    assert engine.free == BLOCKS - 1 and engine.manager.ledger.free_host_blocks == HOST


def test_without_offload_vllm_could_not_admit_it() -> None:
    engine = Engine()
    with pytest.raises(MemoryError):
        engine.step(request("a", 7000), 256, waiting=True)


def test_admission_counts_the_working_set_and_host_memory() -> None:
    engine = Engine()
    for name in "abc":
        engine.manager.ledger.plan(name, Footprint(4, 6, 45))
    engine.step(request("a", 5000, 1), 256, waiting=True)
    engine.step(request("b", 5000, 2), 256, waiting=True)
    with pytest.raises(MemoryError):
        engine.step(request("c", 5000, 3), 256, waiting=True)
    assert engine.free == BLOCKS - 1 - 2 * (4 + 2)


def test_blocks_that_were_given_back_stay_cached_as_prefixes_until_others_take_them() -> None:
    engine, first = Engine(), request("a", 1500)
    engine.manager.ledger.plan("a", PLAN)
    engine.step(first, 512, waiting=True)
    for _ in range(3):
        engine.step(first, 256)
    engine.kv.free(first)
    _, count, _ = engine.kv.get_computed_blocks(request("b", 1500))
    assert count == 1280


def test_a_request_that_hits_a_prefix_keeps_it_until_the_worker_has_seen_it() -> None:
    engine, first, again = Engine(), request("a", 1500), request("b", 1500)
    engine.step(first, 1280, waiting=True)
    engine.kv.free(first)
    engine.manager.ledger.plan("b", PLAN)
    engine.step(again, 100, waiting=True)
    assert 0 not in engine.table(again) and again.num_computed_tokens == 1380
    engine.step(again, 100)
    assert engine.table(again)[:9] == [0] * 9 and 0 not in engine.table(again)[9:]


def test_a_preempted_request_is_offloaded_again_with_other_blocks_told_anew() -> None:
    engine, long = Engine(), request("a", 3000)
    engine.manager.ledger.plan("a", PLAN)
    engine.step(long, 256, waiting=True)
    engine.step(long, 256)
    engine.kv.free(long)
    assert engine.manager.ledger.free_host_blocks == HOST
    long.num_computed_tokens = 0
    assert len(engine.step(long, 256, waiting=True)["a"]) == 4
    assert engine.manager.ledger.free_host_blocks == HOST - PLAN.host


def test_requests_that_are_not_offloaded_are_managed_as_ever() -> None:
    engine, plain = Engine(), request("a", 1500)
    assert engine.step(plain, 700, waiting=True) == {}
    assert engine.step(plain, 700) == {}
    assert 0 not in engine.table(plain) and len(engine.table(plain)) == 11


def test_no_request_needs_more_of_the_cache_than_its_window() -> None:
    spec = replace_as(SPEC, OffloadSpec)
    config: Any = SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=100_000),
        max_in_flight_tokens=1024,
        parallel_config=SimpleNamespace(decode_context_parallel_size=1),
    )
    assert SPEC.max_memory_usage_bytes(config) == 782 * SPEC.page_size_bytes
    assert spec.max_memory_usage_bytes(config) == 10 * SPEC.page_size_bytes
    assert type(OffloadSpec.merge([spec, spec])) is OffloadSpec


ROPED = {"rope_theta": 1e4, "num_attention_heads": 4, "head_dim": 64}


def spec_of(
    monkeypatch: pytest.MonkeyPatch,
    gib: float = 0.0,
    spec: Any = SPEC,
    drafts: str | None = None,
    compression: bool = False,
    model: dict[str, Any] = ROPED,
    scheduler: Any = ExtensibleScheduler,
    ranks: int = 1,
) -> tuple[Any, int]:
    """The spec of a layer in an engine with these; and blocks of its host memory."""

    class Plain:
        vllm_config = SimpleNamespace(
            model_config=SimpleNamespace(max_model_len=1000),
            cache_config=SimpleNamespace(block_size=128),
            parallel_config=SimpleNamespace(tensor_parallel_size=ranks),
            speculative_config=None if drafts is None else SimpleNamespace(method=drafts),
            scheduler_config=SimpleNamespace(get_scheduler_cls=lambda: scheduler),
        )

        def get_model(self) -> Any:
            return nn.Module()

    monkeypatch.setattr(worker, "attention_modules", lambda config, specs: [])
    monkeypatch.setattr(worker, "model_fields", lambda config: model)
    settings = CompressionSettings() if compression else None
    part = worker.AttentionWorkerPart(Plain(), SparseSettings(offload_gib=gib), settings)
    part.is_bound = True
    return part.kv_cache_specs({"layer": spec})["layer"], part.host_blocks


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({}, None),
        ({"drafts": "custom_class"}, None),
        ({"compression": True}, None),
        ({"spec": replace_as(SPEC, OffloadSpec)}, "its layers are"),
        ({"drafts": "eagle"}, "eagle drafts over the cache"),
        ({"gib": 0.0005}, "do not hold a request of 1000 tokens"),
        (
            {"scheduler": Scheduler},
            "runs with scheduler_cls vllm.v1.core.sched.scheduler.Scheduler",
        ),
    ],
)
def test_an_engine_offloads_or_says_why_not(
    changed: dict[str, Any],
    why: str | None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    found, blocks = spec_of(monkeypatch, **{"gib": 1.0, **changed})
    if why is None:
        assert type(found) is OffloadSpec and not caplog.text
        assert blocks == 2**30 // SPEC.page_size_bytes
    else:
        assert found is changed.get("spec", SPEC) and blocks == 0
        assert "techniques.sparse.offload_gib" in caplog.text and why in caplog.text


def test_ranks_share_the_engines_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    found, blocks = spec_of(monkeypatch, gib=1.0, ranks=2)
    assert type(found) is OffloadSpec and blocks == 2**30 // SPEC.page_size_bytes // 2


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({}, None),
        ({"gib": 0.0005}, None),
        ({"drafts": "eagle"}, "eagle drafts over the cache"),
        ({"ranks": 2}, "tensor_parallel_size is above 1"),
        ({"model": ROPED | {"rope_scaling": {"type": "yarn"}}}, "rope_type 'yarn'"),
        ({"model": ROPED | {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"scheduler": Scheduler}, "runs with scheduler_cls vllm.v1.core.sched"),
    ],
)
def test_an_engine_bounds_contexts_or_says_why_not(
    changed: dict[str, Any],
    why: str | None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    found, _ = spec_of(monkeypatch, compression=True, **changed)
    if why is None:
        assert type(found) is CompressionSpec and "techniques.compression" not in caplog.text
        assert SPEC.page_size_bytes == found.page_size_bytes
    else:
        assert found is SPEC
        assert "techniques.compression: requests keep all KV" in caplog.text and why in caplog.text


def test_an_engine_that_neither_offloads_nor_bounds_is_vllms(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert spec_of(monkeypatch) == (SPEC, 0)


def test_where_no_block_is_free_some_of_its_own_stand_in() -> None:
    engine, plain = Engine(), request("a", 20 * 128)
    engine.step(plain, 20 * 128, waiting=True)
    before = engine.table(plain)
    assert engine.free == 0 and engine.manager.may_drop("a", 3, 18)
    slots = engine.manager.drop("a", 3, 18)
    assert set(slots) < set(before[:18]) and engine.free == 15
    engine.kv.free(plain)
    assert engine.free == BLOCKS - 1


def test_blocks_that_another_request_attends_to_stand_in_for_none() -> None:
    engine, first, second = Engine(), request("a", 1300), request("b", 1300)
    engine.step(first, 1300, waiting=True)
    engine.step(second, 20, waiting=True)
    assert engine.table(first)[:10] == engine.table(second)[:10]
    engine.step(request("c", 8 * 128, seed=7), 8 * 128, waiting=True)
    assert engine.free == 0 and not engine.manager.may_drop("a", 3, 10)
    engine.kv.free(second)
    assert engine.manager.may_drop("a", 3, 10)


def test_blocks_of_a_request_are_dropped_and_others_stand_in_for_them() -> None:
    engine, plain = Engine(), request("a", 1500)
    engine.step(plain, 1500, waiting=True)
    before, free = engine.table(plain), engine.free
    slots = engine.manager.drop("a", 3, 10)
    assert engine.table(plain) == [0] * 10 + before[10:] and len(set(slots)) == 3
    assert not set(slots) & set(before)
    assert engine.free == free + 7
    assert engine.manager.held("a") == len(before) - 10 + 3
    engine.step(plain, 300)
    assert engine.table(plain)[:10] == [0] * 10
    engine.kv.free(plain)
    assert engine.free == BLOCKS - 1


def test_blocks_of_a_request_without_their_hashes_are_nobody_elses() -> None:
    engine, plain = Engine(), request("a", 1500)
    plain.block_hashes = plain.block_hashes[:2]
    engine.step(plain, 1500, waiting=True)
    assert engine.manager.num_cached_block.get("a", 0) == 0


def test_vllm_calls_what_we_override() -> None:
    base = "vllm.v1.core.single_type_kv_cache_manager:SingleTypeKVCacheManager"
    assert_takes(
        *(f"{base}.get_num_blocks_to_allocate", MANAGER, "request_id", "num_tokens"),
        *("new_computed_blocks", "total_computed_tokens", "num_local_computed_tokens"),
        *("num_tokens_main_model", "apply_admission_cap"),
    )
    assert_takes(f"{base}.allocate_new_blocks", MANAGER, "request_id", "num_tokens")
    assert_takes(f"{base}.remove_skipped_blocks", MANAGER, "request_id", "num_prompt_tokens")
    assert_takes(f"{base}.pop_blocks_for_free", MANAGER, "request_id")
    preempts = inspect.getsource(Scheduler._preempt_request)
    assert "self._free_request_blocks(request)" in preempts, f"mend {MANAGER}"


def test_a_step_says_whose_kv_is_final_and_whose_is_gone() -> None:
    step = SimpleNamespace(
        scheduled_new_reqs=[SimpleNamespace(req_id="new", num_computed_tokens=128)],
        scheduled_cached_reqs=SimpleNamespace(req_ids=["old"], num_computed_tokens=[500]),
        num_scheduled_tokens={"new": 100, "old": 4},
        scheduled_spec_decode_tokens={"old": [7, 8, 9]},
        preempted_req_ids={"away"},
        finished_req_ids={"done"},
    )
    assert final_tokens(step) == {"new": (128, 228), "old": (500, 501)}
    assert requests_gone(step) == {"away", "done"}
