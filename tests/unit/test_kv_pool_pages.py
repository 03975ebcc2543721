"""The pages of a pool of which recurrent and attention layers are views, as vLLM lays them out."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import MambaConfig
from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheGroupSpec,
    MambaSpec,
    MLAAttentionSpec,
)
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache

from headrace_engine.vllm.kv_cache import pool_pages, recurrent_layout
from headrace_kvstore.blocks.block_layout import BlockLayout

BLOCKS, TOKENS = 6, 32
FULL = FullAttentionSpec(block_size=TOKENS, num_kv_heads=2, head_size=64, dtype=torch.bfloat16)
MLA = MLAAttentionSpec(block_size=TOKENS, num_kv_heads=1, head_size=256, dtype=torch.bfloat16)
PAGE = FULL.page_size_bytes


def state(floats: int = 100, **fields: Any) -> MambaSpec:
    """A convolution's state and a recurrence's, in padded pages."""
    return MambaSpec(
        **{
            "block_size": TOKENS,
            "shapes": ((3, 10), (floats, 4)),
            "dtypes": (torch.bfloat16, torch.float32),
            "page_size_padded": PAGE,
            "mamba_cache_mode": "align",
            **fields,
        }
    )


def engine(layout: str, attention: Any = FULL, layers: tuple[int, ...] = (2, 2, 1)) -> Any:
    """vLLM's own layout of so many layers a group, the first of which is attention."""
    specs = [attention, *[state()] * (len(layers) - 1)]
    groups = [
        KVCacheGroupSpec([f"layers.{number}.{n}" for n in range(count)], spec)
        for number, (spec, count) in enumerate(zip(specs, layers, strict=True))
    ]
    config = SimpleNamespace(
        cache_config=SimpleNamespace(
            get_resolved_kv_cache_layout=lambda: KVCacheLayout[layout],
            num_gpu_blocks_override=BLOCKS,
            prefix_cache_retention_interval=None,
        ),
        attention_config=SimpleNamespace(hisparse_config=None),
    )
    return get_kv_cache_config_from_groups(config, groups, PAGE * 2 * BLOCKS)


@pytest.mark.parametrize("attention", [FULL, MLA])
@pytest.mark.parametrize(
    ("layout", "kernel_tokens"),
    [
        *((layout, TOKENS) for layout in ("LBHNC", "LBNHC", "BLHNC", "BLNHC")),
        *((layout, TOKENS // 2) for layout in ("LBHNC", "LBNHC")),
    ],
)
def test_a_block_of_a_group_is_in_the_pages_of_that_block(
    layout: str, attention: Any, kernel_tokens: int
) -> None:
    config = engine(layout, attention)
    sizes = [kernel_tokens, TOKENS, TOKENS]
    caches = allocate_kv_cache(config, torch.device("cpu"), KVCacheLayout[layout], sizes)
    pages = pool_pages(caches, config)
    assert list(pages) == ["page.0", "page.1"]
    assert all(tuple(page.shape) == (BLOCKS, PAGE) for page in pages.values())
    for group in config.kv_cache_groups:
        for number, name in enumerate(group.layer_names):
            for page in pages.values():
                page.zero_()
            kernels = caches[name].shape[0] // BLOCKS
            caches[name][3 * kernels : 4 * kernels].view(torch.uint8).fill_(7)
            found = {n: (page == 7).any(dim=1).tolist() for n, page in pages.items()}
            assert found.pop(f"page.{number}") == [block == 3 for block in range(BLOCKS)]
            assert not any(map(any, found.values()))
    blocks = BlockLayout.of_tensors(pages, BLOCKS)
    assert blocks.block_bytes == 2 * PAGE and blocks.piece_bytes == PAGE


def test_layers_of_groups_that_lie_elsewhere_are_refused() -> None:
    config = engine("LBHNC")
    caches = allocate_kv_cache(config, torch.device("cpu"), KVCacheLayout["LBHNC"])
    caches["layers.1.1"] = caches["layers.1.1"].clone()
    with pytest.raises(ValueError, match=r"layers\.1\.1 has .* set VLLM_KV_CACHE_LAYOUT=LBHNC"):
        pool_pages(caches, config)


def test_everything_that_decides_what_is_in_a_page_is_in_its_digest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def digest(config: Any, **kernels: Any) -> str:
        vllm_config: Any = SimpleNamespace(mamba_config=MambaConfig(**kernels))
        return recurrent_layout(vllm_config, config)

    plain = engine("LBHNC")
    assert digest(plain) == digest(engine("LBHNC"))
    found = {digest(plain), digest(engine("LBHNC", MLA)), digest(engine("LBHNC", layers=(2, 1, 2)))}
    for other in (
        state(floats=99),
        state(dtypes=(torch.float32, torch.float32)),
        state(mamba_type="gdn_attention"),
    ):
        changed = engine("LBHNC")
        changed.kv_cache_groups[1].kv_cache_spec = other
        found.add(digest(changed))
    found.add(digest(plain, backend="flashinfer"))
    layout = "vllm.model_executor.layers.mamba.mamba_utils.get_conv_state_layout"
    monkeypatch.setattr(layout, lambda: "DS")
    found.add(digest(plain))
    assert len(found) == 8
