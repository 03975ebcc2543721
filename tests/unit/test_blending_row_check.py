"""Rows of a model are computed outside of its steps only if that is measured to be right."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from headrace_engine.kv_views import KvOrder
from headrace_engine.rank_group import RankGroup
from headrace_engine.rope import Rope
from headrace_engine.vllm.forward_pass import Decoder, Unsupported
from headrace_prefill.blending.engine.paged import PagedKV
from headrace_prefill.blending.engine.row_check import check_rows
from headrace_prefill.blending.engine.rows import RowEngine

LAYERS, HEADS, KV_HEADS, DIM, WIDTH, TOKENS = 3, 4, 2, 8, 32, 32
POSITIONS, EXPERTS = 500, 4
SPEEDS = Rope.of({"rope_theta": 100.0, "num_attention_heads": HEADS, "head_dim": DIM}).speeds


class Kernel(nn.Module):
    """An attention that writes K and V to slots, and attends to them as the context says."""

    num_heads, head_size = HEADS, DIM

    def __init__(self, cap: float = 0.0) -> None:
        super().__init__()
        self.impl = SimpleNamespace(scale=DIM**-0.5)
        self.cap, self.layer = cap, 0
        self.kv: PagedKV

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        slots = CONTEXT["slots"]
        shape = (len(slots), -1, DIM)
        self.kv.put(self.layer, slots, key.view(shape), value.view(shape))
        keys, values = (
            one.repeat_interleave(HEADS // KV_HEADS, 1) for one in self.kv.gather(self.layer, slots)
        )
        scores = torch.einsum("qhd,khd->hqk", query.view(shape), keys) * self.impl.scale
        if self.cap:
            scores = self.cap * (scores / self.cap).tanh()
        scores = scores.masked_fill(torch.ones(scores.shape[1:]).triu(1).bool(), float("-inf"))
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1), values).flatten(1)


CONTEXT: dict[str, Tensor] = {}


class Contexts:
    """`ForwardContexts`; metadata is the rows' slots."""

    def metadata(self, queries: Any, lengths: Any, tables: Any, slots: Tensor) -> Any:
        return slots

    @contextmanager
    def layer(self, number: int, metadata: Any, slots: Tensor) -> Iterator[None]:
        CONTEXT["slots"] = metadata
        yield

    def all_layers(self, metadata: Any, slots: Tensor) -> Any:
        return self.layer(0, metadata, slots)


class Layer(nn.Module):
    """Norm, attention, norm, and an MLP or experts."""

    def __init__(self, rope: Rope, cap: float, experts: bool) -> None:
        super().__init__()
        self.attn, self.rope = Kernel(cap), rope
        self.qkv = nn.Linear(WIDTH, (HEADS + 2 * KV_HEADS) * DIM, bias=False)
        self.out = nn.Linear(HEADS * DIM, WIDTH, bias=False)
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False) if experts else None
        self.mlps = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(EXPERTS))

    def forward(
        self, positions: Tensor, hidden_states: Tensor, residual: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        residual = hidden_states if residual is None else residual + hidden_states
        sizes = [HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM]
        q, k, v = self.qkv(normed(residual)).split(sizes, -1)
        q, k = (
            self.rope.shift(one.unflatten(-1, (-1, DIM)), positions).flatten(1) for one in (q, k)
        )
        residual = residual + self.out(self.attn(q, k, v))
        hidden = normed(residual)
        if self.gate is None:
            return self.mlps[0](hidden).tanh(), residual
        chosen = self.gate(hidden).argmax(-1)
        every = torch.stack([mlp(hidden) for mlp in self.mlps], 1)
        return every[torch.arange(len(hidden)), chosen], residual


def normed(hidden: Tensor, residual: Tensor | None = None) -> Any:
    if residual is not None:
        return normed(hidden + residual), hidden + residual
    return hidden / hidden.norm(dim=-1, keepdim=True) * WIDTH**0.5


def engine(
    rope: Rope,
    said: Rope | None = None,
    cap: float = 0.0,
    experts: bool = False,
    scale: float = 1.0,
    between: Callable[[int, Tensor], Tensor] = lambda number, hidden: hidden,
) -> RowEngine:
    """An engine.

    Args:
        rope: by which the model turns keys. said: by which its modules say that it does.
        cap: of its attention scores. scale: of its embeddings, in its own forward pass.
        between: what its own forward pass does to the hidden states after each layer.
    """
    torch.manual_seed(0)
    embed = nn.Embedding(64, WIDTH)
    layers: list[Any] = [Layer(rope, cap, experts) for _ in range(LAYERS)]
    caches = [torch.zeros(4, KV_HEADS, TOKENS, 2 * DIM) for _ in layers]
    kv = PagedKV(caches, KvOrder.JOINED, TOKENS)
    for number, layer in enumerate(layers):
        layer.attn.kv, layer.attn.layer = kv, number

    def forward(ids: Tensor, positions: Tensor) -> Tensor:
        hidden, residual = scale * embed(ids), None
        for number, layer in enumerate(layers):
            hidden, residual = layer(positions, hidden, residual)
            hidden = between(number, hidden)
        found: Tensor = normed(hidden, residual)[0]
        return found

    attention = [layer.attn for layer in layers]
    decoder = Decoder("Made", embed, layers, attention, normed, forward, lambda hidden: hidden)
    contexts: Any = Contexts()
    return RowEngine(decoder, kv, contexts, said or rope, RankGroup())


HALVES, INTERLEAVED = Rope(SPEEDS), Rope(SPEEDS, is_interleaved=True)


@pytest.mark.parametrize("rope", [HALVES, INTERLEAVED])
@pytest.mark.parametrize("experts", [False, True])
def test_a_decoder_of_either_rotation_with_or_without_experts_is_right(
    rope: Rope, experts: bool
) -> None:
    made = engine(rope, experts=experts)
    check_rows(made, POSITIONS)
    assert not any(cache.any() for cache in made.kv.caches), "the block is as it was"
    assert not any(module._forward_hooks for module in made.decoder.attention)


@pytest.mark.parametrize(
    ("made", "why"),
    [
        (engine(HALVES, scale=4.0), "more than embedding, layers and norm"),
        (
            engine(HALVES, between=lambda n, hidden: hidden + 3 if n == 1 else hidden),
            "more than embedding, layers and norm",
        ),
        (engine(HALVES, INTERLEAVED), "turns keys in another way"),
        (engine(INTERLEAVED, HALVES), "turns keys in another way"),
        (engine(HALVES, Rope(SPEEDS / 2)), "turns keys in another way"),
        (engine(HALVES, cap=0.3), "no softmax of scaled products"),
    ],
    ids=["scaled", "between", "halves", "interleaved", "slower", "capped"],
)
def test_another_model_is_refused_by_name(made: RowEngine, why: str) -> None:
    with pytest.raises(Unsupported, match=f"rows of Made cannot be recomputed: .*{why}"):
        check_rows(made, POSITIONS)


def test_a_model_that_computes_no_numbers_is_refused() -> None:
    made = engine(HALVES)
    nn.init.constant_(made.decoder.embed.weight, float("nan"))
    with pytest.raises(Unsupported, match="nan"):
        check_rows(made, POSITIONS)
    assert not any(cache.any() for cache in made.kv.caches)


@pytest.mark.parametrize("positions", [3, 16, 17, 10_000])
def test_short_and_long_contexts_are_checked(positions: int) -> None:
    check_rows(engine(HALVES), positions)
