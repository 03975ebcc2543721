"""Attention of `lite` and `fused` layers for GPUs, on tensors of a CPU in Triton's interpreter."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.interpreted import INTERPRETED, inside, outside, pass_in_the_interpreter

pytest.importorskip("triton")

HEADS, KV_HEADS, DIM, BLOCK, BLOCKS = 4, 2, 32, 16, 12
HND, NHD = (0, 1, 2, 3), (0, 2, 1, 3)
TABLE = [[3, 7, 1], [3, 9, 0], [11, 0, 0]]
"""Two requests share their first block; zeros stand behind the last one's."""
LENGTHS, ROWS = [40, 20, 7], [1, 5, 7]
"""Tokens of KV, and rows of this step: a decode, a chunk, a whole prompt."""

if INTERPRETED:
    from tests.support.seen_triton import have_vllm_see_triton

    have_vllm_see_triton()
    from vllm.v1.attention.backend import CommonAttentionMetadata
    from vllm.v1.attention.backends import triton_attn
    from vllm.v1.attention.backends.utils import create_fast_prefill_custom_backend

    from headrace_prefill.cross_layer.engine.device.attention import FusedBackend, LiteBackend
    from headrace_prefill.cross_layer.engine.device.scratch import Scratch
    from headrace_prefill.cross_layer.engine.mixture import Mixture


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.interpreted(__file__)
@outside
def test_the_attention_for_gpus_holds_in_the_interpreter(
    request: pytest.FixtureRequest,
) -> None:
    pass_in_the_interpreter(request)


def noise(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def cache(seed: int, order: tuple[int, ...]) -> Tensor:
    """[blocks, kv_heads, block, 2 * D], its axes in this order in memory."""
    left = noise(seed, BLOCKS, KV_HEADS, BLOCK, 2 * DIM).permute(order).contiguous()
    return left.permute([order.index(axis) for axis in range(4)])


def metadata(backend: Any, rows: list[int], logits: list[int] | None = None) -> Any:
    """What the backend's builder makes of a step."""
    model = SimpleNamespace(
        get_num_attention_heads=lambda parallel: HEADS,
        get_num_kv_heads=lambda parallel: KV_HEADS,
        get_head_size=lambda: DIM,
        rswa_window=None,
    )
    config: Any = SimpleNamespace(
        model_config=model,
        parallel_config=None,
        compilation_config=SimpleNamespace(cudagraph_mode=None, static_forward_context={}),
    )
    spec: Any = SimpleNamespace(block_size=BLOCK)
    starts = torch.tensor([0, *rows]).cumsum(0).int()
    asked = None if logits is None else torch.tensor(logits)
    common = CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=torch.tensor(LENGTHS, dtype=torch.int32),
        num_reqs=len(rows),
        num_actual_tokens=sum(rows),
        max_query_len=max(rows),
        max_seq_len=max(LENGTHS),
        block_table_tensor=torch.tensor(TABLE, dtype=torch.int32),
        slot_mapping=torch.zeros(sum(rows), dtype=torch.int64),
        logits_indices_padded=asked,
        num_logits_indices=None if logits is None else len(logits),
        max_logits_per_req=1,
    )
    builder = backend.get_builder_cls()(spec, [], config, torch.device("cpu"))
    return builder.build(0, common)


def attended(keys: Tensor, values: Tensor, query: Tensor, rows: list[int]) -> Tensor:
    """Causal attention in plain torch, to K and V [blocks, kv_heads, block, D]."""
    found, at = [], 0
    for blocks, length, count in zip(TABLE, LENGTHS, rows, strict=True):
        k, v = (x[blocks].transpose(0, 1).flatten(1, 2)[:, :length] for x in (keys, values))
        k, v = (x.repeat_interleave(HEADS // KV_HEADS, 0) for x in (k, v))
        scores = query[at : at + count].transpose(0, 1) @ k.mT * DIM**-0.5
        seen = torch.arange(length) <= torch.arange(length - count, length)[:, None]
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        found.append((weights @ v).transpose(0, 1))
        at += count
    return torch.cat(found)


def mixture() -> Mixture:
    made = Mixture(KV_HEADS, DIM)
    for seed, weight in enumerate(made.parameters()):
        weight.data.copy_(noise(20 + seed, *weight.shape))
    return made


def run(backend: Any, sources: dict[str, Any], rows: list[int], told: Any) -> tuple[Any, Any]:
    """What the layer gives, and its queries."""
    impl = backend.get_impl_cls()(HEADS, DIM, DIM**-0.5, KV_HEADS, None, None, "auto", **sources)
    query = noise(3, sum(rows), HEADS, DIM)
    output = torch.empty_like(query)
    own = next(iter(sources.values())).kv_cache  # vLLM binds one of them, which is not read
    impl.forward(SimpleNamespace(), query, None, None, own, told, output)
    return output, query


@pytest.fixture(autouse=INTERPRETED)
def few_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter is slow."""
    monkeypatch.setattr(triton_attn, "NUM_PAR_SOFTMAX_SEGMENTS", 2)


@inside
@pytest.mark.parametrize("order", [HND, NHD])
def test_lite_attends_to_k_of_one_layer_and_v_of_another(order: tuple[int, ...]) -> None:
    low, high = cache(1, order), cache(2, order)
    sources = {"keys": SimpleNamespace(kv_cache=high), "values": SimpleNamespace(kv_cache=low)}
    found, query = run(LiteBackend, sources, ROWS, metadata(LiteBackend, ROWS))
    torch.testing.assert_close(found, attended(high[..., :DIM], low[..., DIM:], query, ROWS))


@inside
@pytest.mark.parametrize("order", [HND, NHD])
def test_fused_attends_to_mixtures(order: tuple[int, ...]) -> None:
    low, high, weights = cache(1, order), cache(2, order), mixture()
    sources: dict[str, Any] = {
        "first": SimpleNamespace(kv_cache=low),
        "last": SimpleNamespace(kv_cache=high),
        "mixture": weights,
        "memory": Scratch(2),
    }
    told = metadata(FusedBackend, ROWS)
    assert told.blocks.tolist() == [1, 3, 7, 9, 11], "those that are read, each once"
    found, query = run(FusedBackend, sources, ROWS, told)
    torch.testing.assert_close(found, mixed(weights, low, high, query, ROWS), atol=1e-5, rtol=1e-5)


@inside
def test_only_rows_with_logits_are_attended_for_in_a_fast_prefill() -> None:
    low, high, weights = cache(1, NHD), cache(2, NHD), mixture()
    sources: dict[str, Any] = {
        "first": SimpleNamespace(kv_cache=low),
        "last": SimpleNamespace(kv_cache=high),
        "mixture": weights,
        "memory": Scratch(2),
    }
    backend = create_fast_prefill_custom_backend("FastPrefill", FusedBackend)
    last = [sum(ROWS[: n + 1]) - 1 for n in range(len(ROWS))]
    told = metadata(backend, ROWS, logits=last)
    assert told.logits_indices_padded.tolist() == last
    found, query = run(FusedBackend, sources, [1] * len(ROWS), told)
    wanted = mixed(weights, low, high, query, [1] * len(ROWS))
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


def mixed(weights: Mixture, low: Tensor, high: Tensor, query: Tensor, rows: list[int]) -> Tensor:
    """Plain attention to the plain mixture."""

    def both(x: Tensor) -> tuple[Tensor, Tensor]:
        return x[..., :DIM], x[..., DIM:]

    (k0, v0), (kn, vn) = both(low), both(high)
    a0, an = (torch.cat([x, x], -1)[:, None] for x in (weights.first_keys, weights.last_keys))
    b0, bn = weights.first_values[:, None], weights.last_values[:, None]
    return attended(k0 * a0 + kn * an, v0 * b0 + vn * bn, query, rows).detach()
