"""A context that is streamed keeps within its budget while its prompt is computed, without an
engine."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from headrace_decode.attention.batch import BatchRow
from headrace_decode.compression.engine.compressed_attention import RetainedPages
from headrace_decode.compression.engine.compression_job import (
    EARLIER_TOKENS,
    MIN_FREED_TOKENS,
    SEGMENT_TOKENS,
    IncrementalJob,
    retained_blocks,
)
from headrace_decode.compression.engine.compression_worker import CompressionWorker
from headrace_decode.compression.engine.head_pages import HeadPages
from headrace_decode.compression.engine.incremental import IncrementalCompression
from headrace_decode.compression.engine.metadata import CompressionMetadata, Retention
from headrace_decode.compression.importance_predictor import ImportancePredictor
from headrace_decode.compression.refit import fit
from headrace_decode.compression.scores import LATER_POSITIONS
from headrace_decode.compression.selection import select_token_pages
from headrace_engine.kv_views import KvOrder
from headrace_engine.rope import Rope
from headrace_lab.compression.streaming import STEP_TOKENS, Masked, Streamed
from headrace_lab.models.lm import LM
from tests.support.moved import positions_of
from tests.support.prompts import noise
from tests.support.tiny import tiny_llama

LAYERS, HEADS, KV_HEADS, DIM, PAGE, PER = 2, 4, 2, 64, 32, 4
BLOCK, SCALE = PAGE * PER, DIM**-0.5
SEGMENT = SEGMENT_TOKENS // BLOCK
ROPE = Rope.of({"rope_theta": 10000.0, "num_attention_heads": 1, "head_dim": DIM})


def rng(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def gate_of(
    seed: int = 0, shape: tuple[int, int, int] = (LAYERS, KV_HEADS, DIM)
) -> ImportancePredictor:
    layers, heads, dim = shape
    into = 0.1 * torch.randn(layers, heads, 2 * dim, 4, generator=rng(seed))
    flat = 0.1 * torch.randn(4, layers, heads, 2 * dim, generator=rng(seed + 1))
    return ImportancePredictor(into, flat[0, ..., :4], flat[1, ..., :4], flat[2], flat[3, ..., 0])


def pages_of(blocks: list[int]) -> Tensor:
    return (torch.tensor(blocks)[:, None] * PER + torch.arange(PER)).reshape(-1)


class Context:
    """KV of a context and the queries of its rows, in a cache."""

    def __init__(self, blocks: int, seed: int) -> None:
        shape = LAYERS, 2 * blocks + 2, PER, KV_HEADS, PAGE, 2 * DIM
        array = torch.full(shape, torch.nan).flatten(1, 2)  # nobody may look at what is not there
        self.head_pages = HeadPages(list(array), PER, KvOrder.VEC)
        self.tokens, self.blocks = blocks * BLOCK, list(range(1, blocks + 1))
        self.keys, self.values = torch.randn(
            2, LAYERS, KV_HEADS, self.tokens, DIM, generator=rng(seed)
        )
        self.queries = torch.randn(LAYERS, self.tokens, HEADS, DIM, generator=rng(seed + 1))
        self.moved, self.fitted = self.keys.clone(), self.values.clone()
        """As they are held."""
        for layer, heads in enumerate(self.head_pages.number(pages_of(self.blocks))):
            for head, at in enumerate(heads):
                self.head_pages.write(at, self.keys[layer, head], self.values[layer, head])

    def held(self, stream: IncrementalCompression) -> Tensor:
        """Which tokens are in a head page of their head: bool [layers, kv_heads, tokens]."""
        assert stream.held is not None
        found = torch.zeros(LAYERS, KV_HEADS, self.tokens, dtype=torch.bool)
        for layer, counts in enumerate(stream.held.dropped.counts):
            for head, count in enumerate(counts):
                at = stream.held.dropped.head_pages[layer, head, :count]
                keys, values = (one[0] for one in self.head_pages.read_head_pages(at[None]))
                positions = torch.cdist(keys, self.moved[layer, head]).argmin(1)
                assert torch.allclose(keys, self.moved[layer, head, positions], atol=1e-5)
                assert torch.allclose(values, self.fitted[layer, head, positions], atol=1e-5)
                found[layer, head, positions] = True
                assert int(found[layer, head].sum()) == PAGE * count
        return found

    def chosen(
        self, predictor: ImportancePredictor, before: Tensor, end: int, pages: int
    ) -> Tensor:
        """What a naive program chooses of what was held `before` and all behind it: as `held`.

        Args:
            before: as `held`, with the tokens that are new.
            end: of the context so far.

        `moved` and `fitted` have the keys and the values then.
        """
        scores = torch.zeros(LAYERS, KV_HEADS, end)
        rows = torch.arange(max(0, end - EARLIER_TOKENS), end)
        later = end + torch.arange(len(rows)) % LATER_POSITIONS
        for layer in range(LAYERS):
            keys = self.keys[layer, :, :end].transpose(0, 1)
            turned = ROPE.shift(keys, -torch.arange(end)).transpose(0, 1)
            told = predictor.scores(layer, turned, self.values[layer, :, :end])
            asked = ROPE.shift(self.queries[layer, rows], later - rows)
            for head in range(KV_HEADS):
                there = before[layer, head, :end]
                of_group = asked[:, 2 * head : 2 * head + 2].flatten(0, 1) * SCALE
                weights = (of_group @ self.moved[layer, head, :end][there].T).softmax(-1)
                own = weights.square().mean(0).sqrt()
                scores[layer, head, there] = torch.hypot(told[head, there], own)
        # Without what is gone, a head's tokens keep their order: what is there is lined up.
        most = int(before[..., :end].sum(-1).max())
        lined = torch.full((LAYERS, KV_HEADS, most), -1.0)
        places = torch.full((LAYERS, KV_HEADS, most), -1)
        for layer in range(LAYERS):
            for head in range(KV_HEADS):
                at = before[layer, head, :end].nonzero()[:, 0]
                fresh = int((at >= self._last).sum())
                old = len(at) - fresh
                lined[layer, head, :old] = scores[layer, head, at[:old]]
                places[layer, head, :old] = at[:old]
                lined[layer, head, most - fresh :] = scores[layer, head, at[old:]]
                places[layer, head, most - fresh :] = at[old:]
        kept = select_token_pages(lined, pages, PAGE)
        found = torch.zeros_like(before)
        for layer in range(LAYERS):
            asked = ROPE.shift(self.queries[layer, rows], later - rows)[:: len(rows) // 64]
            for head in range(KV_HEADS):
                stays = places[layer, head, kept[layer, head]]
                found[layer, head, stays] = True
                of_group = asked[:, 2 * head : 2 * head + 2].flatten(0, 1) * SCALE
                there = before[layer, head, :end].nonzero()[:, 0]
                keys, values = self.moved[layer, head, there], self.fitted[layer, head, there]
                at = torch.searchsorted(there, stays)
                moved, changed = fit(keys, values, at, of_group)
                self.moved[layer, head, stays], self.fitted[layer, head, stays] = moved, changed
        self._last = end
        return found

    _last = 0


@pytest.mark.parametrize("segments", [[6], [4, 6], [4, 5, 7, 8]])
def test_what_is_held_is_what_a_naive_program_chooses(segments: list[int]) -> None:
    context, predictor, kept = Context(segments[-1], 3), gate_of(), 2
    stream = IncrementalCompression(context.head_pages, SCALE, ROPE, predictor)
    naive = torch.zeros(LAYERS, KV_HEADS, context.tokens, dtype=torch.bool)
    before, room = 0, [segments[-1] + 1, 1]
    for end in segments:
        for begin in range(before * BLOCK, end * BLOCK, 100):  # a chunk of a step
            count = min(100, end * BLOCK - begin)
            row = stream.rows(0, count)
            assert row is not None
            for layer in range(LAYERS):
                row.record_queries(layer, context.queries[layer, begin : begin + count])
        pages = pages_of(context.blocks[before:end])
        naive[..., before * BLOCK : end * BLOCK] = True
        head_pages = context.head_pages.of_blocks(room)
        naive = context.chosen(predictor, naive, end * BLOCK, len(head_pages))
        stream.drop(end * BLOCK, pages, head_pages)
        room = [1, 2]  # the next one writes over what holds this one
        assert torch.equal(context.held(stream), naive)
        assert int(naive.sum()) == kept * BLOCK * LAYERS * KV_HEADS
        assert naive[..., :4].all() and naive[..., end * BLOCK - 16 : end * BLOCK].all()
        before = end


@pytest.mark.parametrize("turns", [(), (1500,)])
def test_plain_torch_foresees_what_an_engine_holds(turns: tuple[int, ...]) -> None:
    lm, share, n = LM(str(tiny_llama())), 0.25, 2300
    tokens, heads = torch.tensor(noise(n, 5)), lm.layers * lm.kv_heads
    predictor = gate_of(9, (lm.layers, lm.kv_heads, lm.dim))
    with torch.inference_mode():
        foreseen = Streamed.of(lm, lm.rope, tokens, predictor, share, PAGE, turns)
        assert foreseen is not None
        kv = lm.empty(n)
        shape = lm.layers, 2 * n // PAGE, lm.kv_heads, PAGE, 2 * lm.dim
        head_pages = HeadPages(list(torch.zeros(shape)), PER, KvOrder.VEC)
        kept, chosen, held = torch.zeros_like(foreseen.kept), 0, None
        for last in (*turns, n):
            job = IncrementalJob(last, share, BLOCK)
            job.begin_at(chosen // BLOCK, 0)
            stream = IncrementalCompression(head_pages, lm.dim**-0.5, lm.rope, predictor, held)
            room = head_pages.of_blocks(range(n // BLOCK, n // BLOCK + job.kept))
            room = room[: int(heads * (share * last - last % BLOCK)) // PAGE]
            for begin in range(chosen, last, STEP_TOKENS):
                end = min(last, begin + STEP_TOKENS)
                row = stream.rows(0, end - begin)
                assert row is not None
                kept[..., begin:end] = True
                lm.compute(
                    *(tokens, kv, torch.arange(begin, end)),
                    attend=Masked(kept).attend,
                    watch=lambda layer, rows, q, row=row: row.record_queries(layer, q),  # type: ignore[misc]
                )
                if (due := job.due(end, 0)) is None:
                    continue
                job.dropped = due
                pages = torch.arange(chosen // PAGE, due * PER)
                for layer, heads_at in enumerate(head_pages.number(pages)):
                    both = (one[layer][chosen : due * BLOCK] for one in (kv.keys, kv.values))
                    for at, *mine in zip(heads_at, *(each.unbind(1) for each in both), strict=True):
                        head_pages.write(at, *mine)
                chosen = due * BLOCK
                held = stream.drop(chosen, pages, room)
                kept[..., :chosen] = held_of(stream, head_pages, kv.keys, kv.values)
    assert torch.equal(kept, foreseen.kept)
    for mine, foreseens in ((kv.keys, foreseen.keys), (kv.values, foreseen.values)):
        assert torch.allclose(mine, foreseens, atol=1e-4)
    assert int(kept.sum()) <= share * n * heads
    assert foreseen.most <= heads * BLOCK * job.window(STEP_TOKENS)


def held_of(
    stream: IncrementalCompression, head_pages: HeadPages, keys: Tensor, values: Tensor
) -> Tensor:
    """Which tokens of the context are in a head page: [layers, kv_heads, n]. Their keys and values,
    [layers, positions, kv_heads, dim], become those of the head pages."""
    assert stream.held is not None
    dropped, there = stream.held.dropped, head_pages.read_head_pages
    found = torch.zeros(keys.shape[0], keys.shape[2], dropped.tokens, dtype=torch.bool)
    for layer, counts in enumerate(dropped.counts):
        for head, count in enumerate(counts):
            at = dropped.head_pages[layer, head, :count]
            moved, fitted = (one[0] for one in there(at[None]))
            positions = positions_of(moved, keys[layer, : dropped.tokens, head])
            found[layer, head, positions] = True
            keys[layer, positions, head], values[layer, positions, head] = moved, fitted
    return found


def test_a_share_that_leaves_no_room_for_each_head_streams_nothing() -> None:
    lm = LM(str(tiny_llama()))
    tokens, predictor = torch.tensor(noise(200, 5)), gate_of(9, (lm.layers, lm.kv_heads, lm.dim))
    assert Streamed.of(lm, lm.rope, tokens, predictor, 0.25, PAGE) is None


def test_rows_behind_the_prompt_do_not_count() -> None:
    stream = IncrementalCompression(Context(1, 0).head_pages, SCALE, ROPE, gate_of())
    assert stream.rows(5, 0) is None and stream.rows(5, -1) is None
    row = stream.rows(5, 300)
    assert row is not None and row.tokens == slice(5 + 300 - EARLIER_TOKENS, 305)


def test_a_stream_is_followed_from_its_first_step_to_its_end() -> None:
    context = Context(4, 5)
    following = CompressionWorker(
        context.head_pages, SCALE, ROPE, {"x": context.blocks}.__getitem__, gate_of()
    )
    following.begin_step((), (), CompressionMetadata(incremental={"x"}))
    step = [BatchRow("x", None, 500)], np.array([0, 512]), np.array([512])
    dropped, read = following.select_rows(*step)
    assert not dropped and [each.tokens for each in read] == [slice(244, 500)]
    for layer in range(LAYERS):
        following.record_queries(read, layer, context.queries[layer])
    following.begin_step((), (), CompressionMetadata(retentions={"x": Retention(3 * BLOCK, [6])}))
    dropped, read = following.select_rows(
        [BatchRow("x", None, 500)],
        np.array([0, 1]),
        np.array([513]),
    )
    first = 384 // PAGE
    assert [(each.row, each.held.tokens, each.own) for each in dropped] == [
        (0, 384, slice(first, first + 5))
    ]
    assert not read and following.dropped == 1
    stream = following._incremental["x"]
    assert not any(len(queries) for queries in stream._came), "its last choice is made"
    following.begin_step(
        (), {"x"}, CompressionMetadata()
    )  # preempted: it is computed from its beginning
    dropped, read = following.select_rows(*step)
    assert not dropped and len(read) == 1
    following.begin_step({"x"}, (), CompressionMetadata())
    assert not following
    following.begin_step(
        {"y"}, (), CompressionMetadata(incremental={"y"})
    )  # it was aborted before it began
    assert not following


def test_what_was_held_of_a_prompt_is_what_a_later_one_begins_with() -> None:
    context, predictor = Context(6, 5), gate_of()
    following = CompressionWorker(
        context.head_pages,
        SCALE,
        ROPE,
        {"x": context.blocks, "y": [0, 0, 0, 4, 5]}.__getitem__,
        predictor,
    )

    def computed(name: str, begin: int, end: int) -> list[RetainedPages]:
        step = [BatchRow(name, None, end)], np.array([0, end - begin]), np.array([end])
        dropped, read = following.select_rows(*step)
        for layer in range(LAYERS):
            following.record_queries(read, layer, context.queries[layer, begin:end])
        return [each.held for each in dropped]

    following.begin_step((), (), CompressionMetadata(incremental={"x"}))
    computed("x", 0, 3 * BLOCK)
    following.begin_step(
        (), (), CompressionMetadata(retentions={"x": Retention(3 * BLOCK, [7], cached_id=1)})
    )
    [first] = computed("x", 3 * BLOCK, 5 * BLOCK)
    following.begin_step(
        (), (), CompressionMetadata(retentions={"x": Retention(5 * BLOCK, [8], cached_id=2)})
    )
    [second] = computed("x", 5 * BLOCK, 5 * BLOCK + 1)
    following.begin_step({"x"}, (), CompressionMetadata(incremental={"y"}))
    assert not computed("y", 0, 1), "it waits"
    following.begin_step((), (), CompressionMetadata(cached={"y": 1}, evicted={2}))
    assert computed("y", 3 * BLOCK, 5 * BLOCK) == [first]
    following.begin_step((), (), CompressionMetadata(retentions={"y": Retention(5 * BLOCK, [9])}))
    [rereads] = computed("y", 5 * BLOCK, 5 * BLOCK + 1)
    assert torch.equal(rereads.counts, second.counts)
    filled = torch.arange(rereads.most) < rereads.counts[..., None]
    both = (
        context.head_pages.read_head_pages(each.head_pages[filled][None])
        for each in (rereads, second)
    )
    assert all(torch.equal(one, other) for one, other in zip(*both, strict=True))
    assert following.begin_step((), (), CompressionMetadata(cached={"z": 2})) == {"z"}, "it is lost"


@given(
    prompt=st.integers(1, 40_000),
    share=st.floats(0.01, 0.99),
    chunk=st.integers(1, 2048),
    preempted=st.integers(0, 60),
)
def test_a_stream_never_holds_more_than_its_window_and_ends_with_what_it_keeps(
    prompt: int, share: float, chunk: int, preempted: int
) -> None:
    stream = IncrementalJob(prompt, share, BLOCK)
    if not stream.is_worthwhile:
        kept = retained_blocks(stream.blocks, share, BLOCK)
        assert (stream.blocks - kept) * BLOCK < MIN_FREED_TOKENS
        return
    computed = steps = preemptions = dropped = 0
    slots, freed = 0, 0
    while True:
        due = stream.due(computed, preemptions)
        if due is not None:
            assert dropped < due <= stream.blocks and due * BLOCK <= computed
            assert stream.due(computed, preemptions) == due, "it may be put off"
            stream.dropped = due
            dropped, slots, freed = due, stream.kept, due
        if computed == prompt:
            break
        if steps == preempted:
            computed, preemptions, dropped, slots, freed = 0, 1, 0, 0, 0
            assert stream.due(0, 1) is None
        steps += 1
        computed = min(prompt, computed + chunk)
        assert slots + -(-computed // BLOCK) - freed <= stream.window(chunk) + 1
    assert dropped == stream.blocks and slots == stream.kept
