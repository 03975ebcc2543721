"""The layout reads vLLM's own caches, in every one of its layouts. Slow to import, not to run."""

from __future__ import annotations

import ctypes
import os

import pytest
import torch
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    MLAAttentionSpec,
    compute_layout_strides,
)
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache

from headrace_kvstore.blocks.block_layout import BlockLayout
from headrace_kvstore.blocks.sharding import Shard

NB, HEADS, TOKENS, DIM, LAYERS = 6, 3, 128, 64, 4
DENSE = FullAttentionSpec(
    block_size=TOKENS, num_kv_heads=HEADS, head_size=DIM, dtype=torch.bfloat16
)
MLA = MLAAttentionSpec(block_size=64, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)
FEW = FullAttentionSpec(block_size=32, num_kv_heads=HEADS, head_size=32, dtype=torch.bfloat16)
FEW_MLA = MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)
"""Of few bytes, for the interpreter; a block of theirs still takes a program several turns."""
ROWS_AT_ONCE = 128


def allocate(
    spec: FullAttentionSpec, layout: KVCacheLayout, kernel_tokens: int | None = None
) -> dict[str, torch.Tensor]:
    """What a worker hands to `register_kv_caches`."""
    names = [f"model.layers.{n}.self_attn.attn" for n in range(LAYERS)]
    layer_stride, block_stride, *_ = compute_layout_strides(spec, NB, LAYERS, layout)
    size = NB * LAYERS * spec.page_size_bytes
    tensor = KVCacheTensor(size, names, layer_stride, block_stride)
    config = KVCacheConfig(NB, [tensor], [KVCacheGroupSpec(names, spec)])
    kernel = None if kernel_tokens is None else [kernel_tokens]
    return allocate_kv_cache(config, torch.device("cpu"), layout, kernel)


@pytest.mark.parametrize("layout", list(KVCacheLayout), ids=lambda layout: layout.name)
@pytest.mark.parametrize("spec", [DENSE, MLA], ids=["dense", "MLA"])
def test_every_byte_of_every_block_is_found_once(
    spec: FullAttentionSpec, layout: KVCacheLayout
) -> None:
    caches = allocate(spec, layout)
    found = BlockLayout.of_tensors(caches, NB)
    assert found.names == tuple(caches)
    assert found.layer_bytes == spec.page_size_bytes
    addresses = found.engine_addresses(range(NB))
    for row, (block, layer) in enumerate((b, n) for b in range(NB) for n in range(LAYERS)):
        caches[found.names[layer]][block] = float(row + 1)
    for row, (block, layer) in enumerate((b, n) for b in range(NB) for n in range(LAYERS)):
        raw = b"".join(
            ctypes.string_at(int(address), found.piece_bytes) for address in addresses[block, layer]
        )
        values = torch.frombuffer(bytearray(raw), dtype=torch.bfloat16)
        assert values.unique().tolist() == [float(row + 1)]


def test_the_cpu_engines_blocks_are_one_piece_each() -> None:
    (layout,) = CPUAttentionBackend.supported_kv_cache_layouts()
    found = BlockLayout.of_tensors(allocate(DENSE, layout), NB)
    assert found.piece_bytes == HEADS * TOKENS * 2 * DIM * 2
    assert found.layers[0].axes == f"1:{HEADS},2:{TOKENS},3:{2 * DIM}x2"


def test_smaller_blocks_of_the_kernel_are_grouped() -> None:
    found = BlockLayout.of_tensors(allocate(DENSE, KVCacheLayout.LBHNC, 32), NB)
    assert found.blocks == NB
    assert found.layer_bytes == DENSE.page_size_bytes


interpreted = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="test_kv_device_kernels.py has it run"
)


@interpreted
@pytest.mark.parametrize("layout", list(KVCacheLayout), ids=lambda layout: layout.name)
@pytest.mark.parametrize("spec", [FEW, FEW_MLA], ids=["dense", "MLA"])
def test_the_device_cache_moves_the_same_bytes_as_the_host_cache(
    spec: FullAttentionSpec, layout: KVCacheLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    from headrace_kvstore.device import checksum_kernels as kernels
    from tests.support.devicecache import check_against_host

    monkeypatch.setattr(kernels, "ROWS_AT_ONCE", ROWS_AT_ONCE)  # the interpreter counts turns
    check_against_host(allocate(spec, layout), NB, "cpu")


@interpreted
def test_the_device_cache_takes_kernels_with_smaller_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (layout,) = CPUAttentionBackend.supported_kv_cache_layouts()
    from headrace_kvstore.device import checksum_kernels as kernels
    from tests.support.devicecache import check_against_host

    monkeypatch.setattr(kernels, "ROWS_AT_ONCE", ROWS_AT_ONCE)  # the interpreter counts turns
    check_against_host(allocate(FEW, layout, kernel_tokens=8), NB, "cpu")


@interpreted
@pytest.mark.parametrize("layout", [KVCacheLayout.LBHNC, KVCacheLayout.BHLNC, KVCacheLayout.LBNHC])
@pytest.mark.parametrize("held", [Shard(6, 3, 3), Shard(2, 1, 1)], ids=["heads", "a share"])
def test_the_device_cache_has_some_parts_of_each_layer(
    held: Shard, layout: KVCacheLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    from headrace_kvstore.device import checksum_kernels as kernels
    from tests.support.devicecache import check_against_host

    monkeypatch.setattr(kernels, "ROWS_AT_ONCE", ROWS_AT_ONCE)  # the interpreter counts turns
    check_against_host(allocate(FEW, layout), NB, "cpu", held)


@interpreted
@pytest.mark.parametrize("layout", [KVCacheLayout.LBHNC, KVCacheLayout.BHLNC])
def test_the_device_cache_has_layers_of_two_groups(
    layout: KVCacheLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    from headrace_kvstore.device import checksum_kernels as kernels
    from tests.support.devicecache import check_against_host

    monkeypatch.setattr(kernels, "ROWS_AT_ONCE", ROWS_AT_ONCE)  # the interpreter counts turns
    caches = allocate(FEW, layout)
    groups = {name: number % 2 for number, name in enumerate(caches)}
    check_against_host(caches, NB, "cpu", groups=groups)


@interpreted
@pytest.mark.parametrize("layers_in_blocks", [False, True])
def test_the_device_cache_has_pages_of_a_pool(
    layers_in_blocks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As engines with recurrent layers have them (`pool_pages`)."""
    from headrace_kvstore.device import checksum_kernels as kernels
    from tests.support.devicecache import check_against_host

    monkeypatch.setattr(kernels, "ROWS_AT_ONCE", ROWS_AT_ONCE)  # the interpreter counts turns
    size = FEW.page_size_bytes
    memory = torch.empty(NB * LAYERS * size, dtype=torch.uint8)
    block, page = (LAYERS * size, size) if layers_in_blocks else (size, NB * size)
    pages = {
        f"page.{number}": memory.as_strided((NB, size), (block, 1), number * page)
        for number in range(LAYERS)
    }
    check_against_host(pages, NB, "cpu")
