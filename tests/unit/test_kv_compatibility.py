"""Which engines can exchange KV, by their sizes and layouts: as vLLM's own connector decides.

Slow to import, not to run.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.distributed.kv_transfer.kv_connector.utils import EngineTransferInfo, TransferTopology
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker import NixlBaseConnectorWorker
from vllm.v1.kv_cache_layout import KVCacheLayout

from headrace_engine.kv_transfer.compatibility import KvKind, pieces, refusal

ONE = KvKind("digest", 1, 8, "LBHNC")
LAYOUTS = [layout.name for layout in KVCacheLayout]
HEAD_BYTES = 4096


def why(there: KvKind, here: KvKind) -> str:
    return refusal(str(there), str(here))


def vllm_takes(there: KvKind, here: KvKind) -> bool:
    """What vLLM's decode worker says once it has shaken hands."""
    mla, heads = not here.heads, here.heads or 1

    def block_len(kind: KvKind) -> int:
        return HEAD_BYTES * (1 if mla else max(1, heads // kind.ranks))

    topology = TransferTopology(
        tp_rank=0,
        tp_size=here.ranks,
        block_size=16,
        engine_id="here",
        is_mla=mla,
        is_mamba=False,
        total_num_kv_heads=heads,
        attn_backends=[],
    )
    info = EngineTransferInfo(there.ranks, block_len(there), 16, 1)
    topology.register_remote_engine("there", info)
    worker: Any = SimpleNamespace(
        transfer_topo=topology,
        dcp_size=1,
        use_mla=mla,
        _has_mamba=False,
        _physical_blocks_per_logical_kv_block=1,
        use_host_buffer=False,
        kv_cache_layout=here.layout,
        kv_transfer_config=SimpleNamespace(enable_permute_local_kv=False),
        enable_permute_local_kv=False,
        backend_name="FLASH_ATTN",
        block_len_per_layer=[block_len(here)] * 2,
        _is_region_replicated=lambda _: False,
        _transfer_layer_region_indices=(),
        _transfer_layer_names=(),
        region_group_ids=[],
        _is_hma_required=False,
        dst_num_blocks=defaultdict(lambda: 10),
    )
    meta = SimpleNamespace(
        engine_id="there",
        block_size=16,
        physical_blocks_per_logical_kv_block=1,
        kv_cache_layout=there.layout,
        attn_backend_name="FLASH_ATTN",
        block_lens=[block_len(there)] * 2,
        kv_caches_base_addr=[1, 2],
        num_blocks=10,
        block_strides=[block_len(there)] * 2,
        region_num_blocks=None,
        region_group_ids=None,
        region_names=None,
        region_mem_types=None,
    )
    try:
        NixlBaseConnectorWorker._validate_remote_agent_handshake(worker, meta, there.ranks)
    except (AssertionError, RuntimeError):
        return False
    return True


def possible(ranks: int, heads: int) -> bool:
    """Whether vLLM starts such an engine."""
    return not heads or heads % ranks == 0 or ranks % heads == 0


@pytest.mark.parametrize("heads", [0, 1, 2, 6, 8])
def test_we_allow_what_vllm_allows_and_nothing_else(heads: int) -> None:
    sizes = [ranks for ranks in (1, 2, 3, 4, 8, 16) if possible(ranks, heads)]
    for p, d, at_p, at_d in itertools.product(sizes, sizes, LAYOUTS, LAYOUTS):
        there, here = KvKind("x", p, heads, at_p), KvKind("x", d, heads, at_d)
        assert (not why(there, here)) == vllm_takes(there, here), (there, here)


def test_a_pair_is_refused_by_name_with_what_to_set() -> None:
    two = replace(ONE, ranks=2)
    assert "a change is rolling" in why(replace(ONE, digest="other"), ONE)
    assert "set the same VLLM_KV_CACHE_LAYOUT" in why(replace(two, layout="LBNHC"), ONE)
    assert "one must be a multiple" in why(replace(ONE, ranks=3), two)
    assert "may have 8 at most" in why(replace(ONE, ranks=16), two)
    plain = replace(ONE, layout="LBNHC"), replace(two, layout="LBNHC")
    assert "this one has LBNHC; set VLLM_KV_CACHE_LAYOUT=HND" in why(*plain)
    assert "set sampled" in why(ONE, replace(two, check_all=True))
    assert "is 1 for prefill and 2 for decode" in why(ONE, replace(two, layout=""))


def test_equal_sizes_need_not_tell_their_layouts() -> None:
    assert not why(replace(ONE, layout=""), ONE)
    assert not why(ONE, replace(ONE, check_all=True))


def test_who_does_not_tell_takes_any_and_another_version_s_words_are_a_digest() -> None:
    assert not refusal("", str(ONE)) and not refusal(str(ONE), "")
    assert not refusal("0123456789abcdef", "0123456789abcdef")
    assert "a change is rolling" in refusal("0123456789abcdef", str(ONE))


@given(st.text(alphabet="0123456789abc/LBHN", max_size=30))
def test_any_words_of_a_replica_can_be_read(text: str) -> None:
    assert KvKind.parse(text).ranks >= 1


def test_a_prompt_s_kv_comes_in_as_many_pieces_as_ranks_have_different_heads() -> None:
    assert [pieces(*sizes, 8) for sizes in ((1, 1), (1, 2), (4, 2), (2, 16))] == [1, 2, 4, 8]
    assert pieces(4, 4, 1) == pieces(2, 8, 0) == 1
