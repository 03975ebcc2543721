"""Dropping KV in an engine, without an engine: head pages, which rows count, and attention to what
is held."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

from headrace_decode.attention.batch import BatchRow
from headrace_decode.attention_backend.cpu import scheduled_attention
from headrace_decode.compression.engine.compressed_attention import (
    CompressedRow,
    CompressedStep,
    RetainedPages,
)
from headrace_decode.compression.engine.compression_job import (
    EARLIER_TOKENS,
)
from headrace_decode.compression.engine.compression_worker import CompressionWorker
from headrace_decode.compression.engine.context_scorer import ContextScorer, RereadRows, scoring_row
from headrace_decode.compression.engine.head_pages import HeadPages
from headrace_decode.compression.engine.metadata import CompressionMetadata, FitWork, Retention
from headrace_decode.compression.importance_predictor import ImportancePredictor
from headrace_decode.compression.refit import fit_layer
from headrace_decode.compression.scores import LATER_POSITIONS
from headrace_decode.compression.selection import select_token_pages
from headrace_engine.kv_views import KvOrder
from headrace_engine.rope import Rope
from headrace_engine.vllm.attention.cpu import schedule

LAYERS, HEADS, KV_HEADS, DIM, PAGE, PER = 3, 6, 2, 64, 32, 4
BLOCK, SCALE = PAGE * PER, DIM**-0.5
IN_BLOCK = LAYERS * PER * KV_HEADS
"""Head pages of a block."""
LONGEST = 8192
ROPE = Rope.of({"rope_theta": 10000.0, "num_attention_heads": 1, "head_dim": DIM})


def rng(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def cells_of(blocks: int) -> HeadPages:
    """A cache of so many blocks of the scheduler, as vLLM allocates it."""
    shape = LAYERS, blocks * PER, KV_HEADS, PAGE, 2 * DIM
    return HeadPages(list(torch.randn(shape, generator=rng(0))), PER, KvOrder.VEC)


def pages_of(blocks: list[int]) -> Tensor:
    return (torch.tensor(blocks)[:, None] * PER + torch.arange(PER)).reshape(-1)


def fill(
    head_pages: HeadPages, blocks: list[int], tokens: int, seed: int = 1
) -> tuple[Tensor, Tensor]:
    """Write random KV into blocks; K and V, each [layers, kv_heads, tokens, dim]."""
    pages = pages_of(blocks)[: -(-tokens // PAGE)]
    room = len(pages) * PAGE
    keys, values = torch.randn(2, LAYERS, KV_HEADS, room, DIM, generator=rng(seed))
    for layer, heads in enumerate(head_pages.number(pages)):
        for head, at in enumerate(heads):
            head_pages.write(at, keys[layer, head], values[layer, head])
    return keys[..., :tokens, :], values[..., :tokens, :]


def test_a_cell_is_a_page_of_one_head_and_each_block_has_its_own() -> None:
    head_pages = cells_of(6)
    of_blocks = [head_pages.of_blocks([block]) for block in range(6)]
    assert {len(each) for each in of_blocks} == {IN_BLOCK}
    assert sorted(torch.cat(of_blocks).tolist()) == list(range(6 * IN_BLOCK))
    for layer in range(LAYERS):
        mine = set(head_pages.number(pages_of([2]))[layer].reshape(-1).tolist())
        assert mine <= set(of_blocks[2].tolist())


def test_what_is_written_to_cells_is_what_layers_read() -> None:
    head_pages = cells_of(4)
    keys, values = fill(head_pages, [2, 1], 2 * BLOCK)
    for layer in range(LAYERS):
        found = head_pages.read(layer, pages_of([2, 1]))
        assert torch.equal(found[0], keys[layer]) and torch.equal(found[1], values[layer])


def test_layers_that_lie_apart_are_refused() -> None:
    apart = [torch.zeros(4, KV_HEADS, PAGE, 2 * DIM) for _ in range(2)]
    with pytest.raises(ValueError, match="layer 1's KV cache is not in the allocation"):
        HeadPages(apart, PER, KvOrder.VEC)


@given(
    first=st.integers(0, 60),
    rows=st.integers(1, 40),
    bounds=st.lists(st.integers(0, 80), min_size=3, max_size=3).map(sorted),
    at=st.integers(0, 9),
)
def test_just_the_rows_of_each_kind_count(
    first: int, rows: int, bounds: list[int], at: int
) -> None:
    earlier, end, repeating = bounds
    rereads = RereadRows("x", end, earlier, repeating)
    scorer = ContextScorer(rereads, torch.arange(2), cells_of(1), SCALE, ROPE)
    found = scoring_row(rereads, scorer, at, first, rows)
    positions = {at + n: first + n for n in range(rows)}
    wanted = [
        {n for n, position in positions.items() if earlier <= position < end},
        {n for n, position in positions.items() if position >= repeating},
    ]
    got = (
        [set(), set()]
        if found is None
        else [set(range(*s.indices(10**6))) for s in (found.earlier, found.repeating)]
    )
    assert got == wanted


def test_a_gate_stands_for_rows_that_repeat() -> None:
    head_pages, n = cells_of(4), 2 * BLOCK
    keys, values = fill(head_pages, [3, 1], n)
    draw = torch.randn(LAYERS, KV_HEADS, 2 * DIM + 1, 8, generator=rng(3)) * 0.05
    predictor = ImportancePredictor(
        draw[..., :-1, :], draw[..., -1, :], draw[..., 0, :], draw[..., :-1, 0], draw[..., 0, 0]
    )
    rereads, queries = RereadRows("x", n, n - 70, n), torch.randn(70, HEADS, DIM, generator=rng(5))
    facts = rereads, pages_of([3, 1]), head_pages, SCALE, ROPE
    has_predictor, plain = ContextScorer(*facts, predictor), ContextScorer(*facts)
    for scorer in (has_predictor, plain):
        one = scoring_row(rereads, scorer, 0, n - 70, 70)
        assert one is not None and one.repeating.start == one.repeating.stop
        for layer in range(LAYERS):
            one.record_queries(layer, queries)
        scorer.score(2)
        scorer.score(LAYERS)
    scores = has_predictor.scores()
    at = torch.arange(n)
    for layer, earlier in enumerate(plain._earlier):
        turned = ROPE.shift(keys[layer].transpose(0, 1), -at).transpose(0, 1)
        told = predictor.scores(layer, turned, values[layer])
        assert torch.allclose(
            scores[layer], torch.hypot(told, earlier.root_mean_square()), atol=1e-5
        )


def test_scores_are_those_of_all_rows_in_whatever_parts_they_came() -> None:
    head_pages = cells_of(4)
    keys, _ = fill(head_pages, [3, 1], 2 * BLOCK)
    n = 2 * BLOCK
    rereads = RereadRows("x", n, n - 70, n + 10)
    queries = torch.randn(120, HEADS, DIM, generator=rng(5))
    facts = pages_of([3, 1]), head_pages, SCALE, ROPE
    whole, parts = (ContextScorer(rereads, *facts) for _ in range(2))
    for scorer, steps in ((whole, [120]), (parts, [17, 60, 1, 42])):
        at = 0
        for count in steps:
            one = scoring_row(rereads, scorer, 0, n - 70 + at, count)
            for layer in range(LAYERS):
                if one is not None:
                    one.record_queries(layer, queries[at : at + count])
            scorer.score(2)
            at += count
    assert torch.allclose(whole.scores(), parts.scores(), atol=1e-6)
    later = n + torch.arange(70) % LATER_POSITIONS
    turned = ROPE.shift(queries[:70], later - torch.arange(n - 70, n))
    weights = [
        (rows[:, head] * SCALE @ keys[1, 0].T).softmax(-1).square()
        for rows in (turned, queries[80:])
        for head in range(HEADS // KV_HEADS)
    ]
    kinds = torch.cat(weights[:3]).mean(0) + torch.cat(weights[3:]).mean(0)
    assert torch.allclose(whole.scores()[1, 0], kinds.sqrt(), atol=1e-5)


def test_layers_are_fitted_to_every_fourth_of_the_contexts_last_rows_some_in_each_step() -> None:
    head_pages, n = cells_of(4), 2 * BLOCK
    keys, values = fill(head_pages, [3, 1], n)
    rereads = RereadRows("x", n, n - EARLIER_TOKENS, n + 10)
    queries = torch.randn(EARLIER_TOKENS + 40, HEADS, DIM, generator=rng(5))
    facts = pages_of([3, 1]), head_pages, SCALE, ROPE
    whole, parts = (ContextScorer(rereads, *facts) for _ in range(2))
    for scorer, steps in ((whole, [len(queries)]), (parts, [17, 60, 1, 42, 176])):
        at = 0
        for count in steps:
            one = scoring_row(rereads, scorer, 0, n - EARLIER_TOKENS + at, count)
            for layer in range(LAYERS):
                if one is not None:
                    one.record_queries(layer, queries[at : at + count])
            scorer.score(2)
            at += count
    for layers in (1, 0, LAYERS):
        parts.fit(IN_BLOCK, layers)
    stays, found = parts.kept(IN_BLOCK)
    assert int(stays.sum()) == IN_BLOCK * PAGE and len(found) == LAYERS
    last = torch.arange(0, EARLIER_TOKENS, 4)
    asked = ROPE.shift(queries[last], n + last % LATER_POSITIONS - (n - EARLIER_TOKENS + last))
    wanted = [fit_layer(*each, asked, SCALE) for each in zip(keys, values, stays, strict=True)]
    for kept in (found, whole.kept(IN_BLOCK)[1]):
        for layer, heads in enumerate(kept):
            for mine, its in zip(heads, wanted[layer], strict=True):
                assert all(torch.allclose(*pair, atol=1e-4) for pair in zip(mine, its, strict=True))


def attended(keys: Tensor, values: Tensor, query: Tensor) -> Tensor:
    """[dim] of one head."""
    return (query * SCALE @ keys.T).softmax(-1) @ values


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("queries", [1, 4])
def test_rows_attend_to_what_each_head_holds_and_to_all_behind_it(queries: int, own: bool) -> None:
    """`own`: it is held in a block of the context itself."""
    head_pages, contexts = cells_of(24), [(4, 150), (6, 1)]
    facts = {"kv_heads": 1, "group": HEADS // KV_HEADS, "head_dim": DIM, "dtype": torch.float32}
    isa = _get_attn_isa(torch.float32, PAGE, DIM, "auto")
    rows, expected, at, block = [], [], 0, 1
    tables = torch.zeros(len(contexts), 24 * PER, dtype=torch.int32)
    asked = torch.randn(2 * queries + 3, HEADS, DIM, generator=rng(9))
    for number, (context, behind) in enumerate(contexts):
        behind += queries
        size = context + -(-behind // BLOCK)
        blocks = list(range(block, block + size))
        slots = blocks[context // 2 :][:1] if own else [block + size]
        block += size + 1
        tokens = context * BLOCK
        keys, values = fill(head_pages, blocks, tokens + behind, seed=20 + number)
        scores = torch.rand(LAYERS, KV_HEADS, tokens, generator=rng(number))
        scores[0] *= 5  # the first layer keeps more than a block has room for in one
        pages = pages_of(blocks)
        kept = select_token_pages(scores, IN_BLOCK, PAGE)
        layers = (
            [(k[:tokens][at], v[:tokens][at]) for k, v, at in zip(*heads, strict=True)]
            for heads in zip(keys, values, kept, strict=True)
        )
        held = RetainedPages.of(tokens, kept, layers, head_pages.of_blocks(slots), head_pages)
        assert held.counts.tolist() == (kept.sum(-1) // PAGE).tolist()
        for name in {*blocks[:context]} - {*slots}:  # others write there
            head_pages.write(
                head_pages.of_blocks([name]), *torch.full((2, IN_BLOCK * PAGE, DIM), 1e4)
            )
        behind_it = slice(tokens // PAGE, -(-(tokens + behind) // PAGE))
        mine = slice(at + number, at + number + queries)  # a row of others stands between
        rows.append(CompressedRow(number, mine, tokens + behind, held, behind_it))
        tables[number, : len(pages)] = pages
        stays = torch.cat([kept, torch.ones(LAYERS, KV_HEADS, behind, dtype=torch.bool)], -1)
        expected.append((mine, keys, values, stays))
        at += queries
    call = partial(scheduled_attention, partial(schedule, isa=isa, **facts))
    step = CompressedStep(rows, tables, head_pages, call)
    for layer in range(LAYERS):
        output = torch.full_like(asked, torch.nan)
        step.attend(layer, asked, output, SCALE)
        for mine, keys, values, stays in expected:
            n = keys.shape[-2]
            for token, position in zip(
                range(*mine.indices(99)), range(n - queries, n), strict=True
            ):
                for head in range(HEADS):
                    kv = head // (HEADS // KV_HEADS)
                    seen = stays[layer, kv] & (torch.arange(n) <= position)
                    naive = attended(
                        keys[layer, kv, seen], values[layer, kv, seen], asked[token, head]
                    )
                    assert torch.allclose(output[token, head], naive, atol=1e-4)
        assert output[queries].isnan().all() and output[-1].isnan().all()


def test_a_request_is_followed_from_its_reading_to_its_end() -> None:
    head_pages = cells_of(12)
    blocks = [1, 2, 3, 4, 5]
    fill(head_pages, blocks, 5 * BLOCK)
    following = CompressionWorker(head_pages, SCALE, ROPE, {"x": blocks}.__getitem__)
    n = 4 * BLOCK
    rereads = RereadRows("x", n, n - 10, n + 5)
    following.begin_step((), (), CompressionMetadata(rereads={"x-again-1": rereads}))
    batch = [BatchRow("x-again-1", None, 1), BatchRow("other", None, 1)]
    starts = np.array([0, 40, 41])
    dropped, read = following.select_rows(batch, starts, np.array([n + 30, 50]))
    assert not dropped and len(read) == 1 and "x" not in following
    for layer in range(LAYERS):
        following.record_queries(read, layer, torch.randn(41, HEADS, DIM, generator=rng(3)))
    following.begin_step({"x-again-1"}, (), CompressionMetadata(fits={"x": FitWork(1, 1)}))
    assert "x" not in following
    following.begin_step(
        (), {"y"}, CompressionMetadata(fits={"y": FitWork(1, 1)})
    )  # it was preempted meanwhile
    following.begin_step((), (), CompressionMetadata(retentions={"x": Retention(n, [7])}))
    assert "x" in following and following.dropped == 1
    lengths = np.array([n + 1, 9])
    rows = [BatchRow("x", None, n), BatchRow("other", None, 1)]
    dropped, read = following.select_rows(rows, np.array([0, 1, 2]), lengths)
    first = n // PAGE
    assert [(each.row, each.kv_tokens, each.own) for each in dropped] == [
        (0, n + 1, slice(first, first + 1))
    ]
    assert not read
    following.begin_step({"x"}, (), CompressionMetadata())
    assert "x" not in following and not following


def test_a_request_that_is_preempted_as_it_is_to_drop_does_not() -> None:
    following = CompressionWorker(cells_of(4), SCALE, ROPE, {}.__getitem__)
    following.begin_step((), {"x"}, CompressionMetadata(retentions={"x": Retention(BLOCK, [1])}))
    assert "x" not in following and following.dropped == 0


def test_a_request_that_drops_what_was_not_read_is_lost_and_no_other(
    caplog: pytest.LogCaptureFixture,
) -> None:
    blocks = {"x": [1, 2, 3, 4, 5], "y": [6, 7, 8, 9]}
    head_pages, n = cells_of(12), 4 * BLOCK
    fill(head_pages, blocks["x"], 5 * BLOCK)
    following = CompressionWorker(head_pages, SCALE, ROPE, blocks.__getitem__)
    rereads = RereadRows("x", n, n - 10, n + 5)
    following.begin_step((), (), CompressionMetadata(rereads={"r": rereads}))
    step = [BatchRow("r", None, 1)], np.array([0, 40]), np.array([n + 30])
    _, read = following.select_rows(*step)
    for layer in range(LAYERS):
        following.record_queries(read, layer, torch.randn(40, HEADS, DIM, generator=rng(3)))
    told = CompressionMetadata(
        fits={"y": FitWork(1, 1)}, retentions={"x": Retention(n, [10]), "y": Retention(n, [11])}
    )
    assert following.begin_step({"r"}, (), told) == {"y"}
    assert "x" in following and "y" not in following
    assert "y: KV is lost" in caplog.text


@pytest.mark.parametrize(
    "told",
    [CompressionMetadata(layers=LAYERS), CompressionMetadata(fits={"x": FitWork(1, LAYERS)})],
)
def test_a_context_that_cannot_be_scored_or_fitted_keeps_all_its_kv(
    told: CompressionMetadata, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    blocks, n = [1, 2, 3, 4, 5], 4 * BLOCK
    following = CompressionWorker(cells_of(12), SCALE, ROPE, {"x": blocks}.__getitem__)
    following.begin_step(
        (), (), CompressionMetadata(rereads={"r": RereadRows("x", n, n - 10, n + 5)})
    )
    step = [BatchRow("r", None, 1)], np.array([0, 40]), np.array([n + 30])
    following.select_rows(*step)

    def broken(*_: object) -> None:
        raise ValueError("scores are finite numbers")

    monkeypatch.setattr(ContextScorer, "score", broken)
    monkeypatch.setattr(ContextScorer, "fit", broken)
    assert following.begin_step((), (), told) == set() and not following.scorers
    assert "x: it keeps all KV" in caplog.text
    assert following.begin_step(
        (), (), CompressionMetadata(retentions={"x": Retention(n, [7])})
    ) == {"x"}


def test_a_stream_that_begins_with_what_is_not_there_is_lost() -> None:
    following = CompressionWorker(cells_of(12), SCALE, ROPE, {}.__getitem__)
    assert following.begin_step(
        (), (), CompressionMetadata(incremental={"x"}, cached={"x": 3})
    ) == {"x"}
    assert not following


def test_rows_of_a_reader_that_was_preempted_count_once() -> None:
    head_pages, blocks = cells_of(12), [1, 2, 3, 4, 5]
    fill(head_pages, blocks, 5 * BLOCK)
    n = 4 * BLOCK
    queries = torch.randn(60, HEADS, DIM, generator=rng(3))
    scores = []
    for chunks in ([(0, 60)], [(0, 35), (0, 20), (20, 60)]):
        following = CompressionWorker(head_pages, SCALE, ROPE, {"x": blocks}.__getitem__)
        following.begin_step(
            (), (), CompressionMetadata(rereads={"r": RereadRows("x", n, n - 10, n + 5)})
        )
        for begin, end in chunks:
            following.begin_step(
                (), {"r"} if len(chunks) > 1 and not begin else (), CompressionMetadata()
            )
            starts, lengths = np.array([0, end - begin]), np.array([n - 10 + end])
            _, read = following.select_rows([BatchRow("r", None, 1)], starts, lengths)
            for layer in range(LAYERS):
                following.record_queries(read, layer, queries[begin:end])
        scores.append(following.scorers["x"].scores())
    assert torch.allclose(*scores, atol=1e-6)


def test_a_context_that_is_read_anew_knows_nothing_of_the_first_time() -> None:
    blocks = {"x": [1, 2, 3, 4, 5]}
    following = CompressionWorker(cells_of(12), SCALE, ROPE, blocks.__getitem__)
    n = 4 * BLOCK
    step = [BatchRow("r", None, 1)], np.array([0, 60]), np.array([n + 50])
    for _ in range(2):
        rereads = RereadRows("x", n, n - 10, n + 5)
        following.begin_step({"r"}, {"x"}, CompressionMetadata(rereads={"r": rereads}))
        _, read = following.select_rows(*step)
        scorer = following.scorers["x"]
        assert scorer._pages.tolist() == pages_of(blocks["x"])[: 4 * PER].tolist()
        assert not any(scorer._came)
        following.record_queries(read, 0, torch.zeros(60, HEADS, DIM))
        assert scorer._came[0]
        blocks["x"] = [7, 8, 9, 10, 11]
