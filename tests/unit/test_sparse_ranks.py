"""Which of a model's KV heads a tensor-parallel worker has, and its part of a calibration."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm.config import ParallelConfig
from vllm.model_executor.layers.linear import QKVParallelLinear

from headrace_decode.sparse.basis import Basis
from headrace_engine.vllm.attention import layers
from headrace_engine.vllm.attention.layers import kv_heads_of_worker


def of_rank(monkeypatch: pytest.MonkeyPatch, ranks: int, rank: int, kv_heads: int) -> range:
    monkeypatch.setattr(layers, "get_tensor_model_parallel_rank", lambda: rank)
    config: Any = SimpleNamespace(parallel_config=ParallelConfig(tensor_parallel_size=ranks))
    return kv_heads_of_worker(config, kv_heads)


@pytest.mark.parametrize(("ranks", "kv_heads"), [(1, 3), (2, 2), (2, 8), (4, 8), (4, 2), (8, 1)])
def test_heads_are_those_of_vllms_layers(
    monkeypatch: pytest.MonkeyPatch, ranks: int, kv_heads: int
) -> None:
    """vLLM's rule is in its layer of queries, keys and values."""
    own = max(1, kv_heads // ranks)
    replicas = max(1, ranks // kv_heads)
    for rank in range(ranks):
        linear: Any = SimpleNamespace(
            num_kv_heads=own, num_kv_head_replicas=replicas, tp_rank=rank, head_size=1
        )
        shard = linear.tp_rank // linear.num_kv_head_replicas
        expected = range(shard * own, (shard + 1) * own)
        assert of_rank(monkeypatch, ranks, rank, kv_heads) == expected
    source = inspect.getsource(QKVParallelLinear)
    assert "tp_rank // self.num_kv_head_replicas" in source, "mend kv_heads_of_worker"


def test_a_basis_is_divided_by_heads() -> None:
    rng = np.random.default_rng(0)
    shapes = (4, 8), (4, 8, 2), (4, 2, 8)
    whole = Basis(*(rng.normal(size=shape).astype(np.float32) for shape in shapes))
    part = whole.of_heads(range(2, 4))
    assert (part.origin == whole.origin[2:]).all()
    assert (part.into == whole.into[2:]).all()
    assert (part.back == whole.back[2:]).all()
    assert part.into.flags.c_contiguous
