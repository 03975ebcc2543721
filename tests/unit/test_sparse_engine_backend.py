"""The sparse backend against vLLM's own and against plain torch. No engine."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.sparse.backend import Request, Rig, Shape, random_sequence
from headrace_decode.attention_backend.cpu import SparseImpl
from headrace_decode.sparse.engine.attention import SparseStep
from headrace_engine.vllm.attention.cpu import KNOWN_ISAS
from headrace_lab.sparse.moments import Moments

BF16 = Shape()
SHAPES = {
    "smollm2": BF16,
    "float32": Shape(4, 2, 32, torch.float32),
    "multi-head": Shape(2, 2, 128, torch.float16),
}
LONG = 2500


def step_of(rig: Rig, batch: list[Request]) -> tuple[Any, Tensor]:
    """A step's metadata and its attention, when all summaries are made."""
    tables = [rig.write(each.keys, each.values) for each in batch]
    for _ in range(20):
        metadata = rig.metadata(batch, rig.common(batch, tables))
    output = rig.forward(torch.cat([each.queries for each in batch]), metadata)
    return metadata, output


def sparse_of(metadata: Any) -> SparseStep | None:
    """The step's sparse rows."""
    found: SparseStep | None = getattr(metadata, "sparse", None)
    return found


def naive(request: Request, shape: Shape, chosen: Tensor, page: int) -> Tensor:
    """Attention over chosen pages: int [kv_heads, n]."""
    group, n = shape.heads // shape.kv_heads, len(request.keys)
    out = torch.empty(shape.heads, shape.head_dim)
    for head in range(shape.heads):
        kv = head // group
        at = (chosen[kv, :, None] * page + torch.arange(page)).flatten()
        at = at[at < n]
        keys, values = request.keys[at, kv].float(), request.values[at, kv].float()
        logits = keys @ request.queries[-1, head].float() * shape.scale
        out[head] = logits.softmax(0) @ values
    return out


def chosen_by(step: Any, rig: Rig, number: int, kv_heads: int) -> Tensor:
    """The pages that a row attended to, by their order in the request: int [kv_heads, n]."""
    row = step.rows[number]
    blocks = torch.from_numpy(step._table[number, :, : row.chosen]).long()
    assert (blocks % kv_heads == torch.arange(kv_heads)[:, None]).all()
    order = torch.full((len(rig.cache),), -1)
    order[torch.from_numpy(row.pages)] = torch.arange(len(row.pages))
    order[row.newest] = len(row.pages)
    return order[blocks // kv_heads]


def skip_where_refused(rig: Rig) -> None:
    """Skip where vLLM orders keys as sparse attention does not know, which it refuses."""
    if rig.builder.isa not in KNOWN_ISAS:
        pytest.skip(f"the order of keys for {rig.builder.isa} is not known")


@pytest.mark.parametrize("page", [16, 32])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("tokens", [LONG, 2560, 2561])
def test_a_row_attends_to_the_pages_that_it_chose(page: int, shape: Shape, tokens: int) -> None:
    request, rig = random_sequence(shape, tokens, share=0.2), Rig(shape, page, True, 400)
    metadata, output = step_of(rig, [request])
    step = sparse_of(metadata)
    assert step is not None and not metadata.vllms
    chosen = chosen_by(step, rig, 0, shape.kv_heads)
    n = -(-tokens // page)
    assert chosen.shape == (shape.kv_heads, -(-n // 5)) and (chosen.diff(dim=1) > 0).all()
    assert (chosen[:, 0] == 0).all() and (chosen[:, -2:] == torch.tensor([n - 2, n - 1])).all()
    assert len({tuple(each) for each in chosen.tolist()}) == shape.kv_heads, "each its own"
    wanted = naive(request, shape, chosen, page)
    torch.testing.assert_close(output[0].float(), wanted, atol=4e-3, rtol=1e-2)


@pytest.mark.parametrize("page", [16, 32])
def test_chosen_pages_hold_the_tokens_that_a_query_looks_for(page: int) -> None:
    request = random_sequence(BF16, LONG, share=0.1)
    wanted = 777
    keys = request.keys.clone()
    keys[wanted] = 4 * request.queries[0].view(3, 3, 64).mean(1) / BF16.scale**0.5
    rig = Rig(BF16, page, True, 400)
    skip_where_refused(rig)
    metadata, _ = step_of(rig, [Request(keys, request.values, request.queries, 0.1)])
    chosen = chosen_by(sparse_of(metadata), rig, 0, 3)
    assert (chosen == wanted // page).any(dim=1).all()


def test_a_share_of_one_is_vllms_attention_bit_for_bit() -> None:
    request = random_sequence(BF16, LONG, share=1.0)
    metadata, output = step_of(Rig(BF16, 32, True, 400), [request])
    assert sparse_of(metadata) is None
    assert torch.equal(output, Rig(BF16, 128, False, 100).step([request]))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("position", [0, 2, 4])
def test_exact_rows_beside_sparse_ones_are_vllms_bit_for_bit(threads: int, position: int) -> None:
    exact = [
        random_sequence(BF16, 2300, queries=1, seed=1),
        random_sequence(BF16, 700, queries=200, seed=2),
        random_sequence(BF16, 2600, queries=4, share=0.1, seed=3),
        random_sequence(BF16, 40, queries=1, share=0.1, seed=4),
    ]
    sparse = random_sequence(BF16, LONG, share=0.1, seed=5)
    batch = [*exact[:position], sparse, *exact[position:]]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        metadata, output = step_of(Rig(BF16, 32, True, 600), batch)
        plain = Rig(BF16, 128, False, 200).step(batch)
    finally:
        torch.set_num_threads(before)
    step = sparse_of(metadata)
    assert step is not None and metadata.vllms and [row.row for row in step.rows] == [position]
    assert metadata.seq_lens[position] == 1, "the dense kernel has nothing to do for it"
    first = sum(len(each.queries) for each in batch[:position])
    others = torch.ones(len(output), dtype=torch.bool)
    others[first] = False
    assert torch.equal(output[others], plain[others])
    assert not torch.equal(output[first], plain[first])


def test_sparse_rows_of_one_step_do_not_touch_each_other() -> None:
    batch = [
        random_sequence(BF16, tokens, share=share, seed=tokens)
        for tokens, share in ((LONG, 0.1), (4000, 0.3), (2100, 0.05))
    ]
    batch.insert(1, random_sequence(BF16, 300, queries=5))
    _, together = step_of(Rig(BF16, 32, True, 400), batch)
    alone = [step_of(Rig(BF16, 32, True, 400), [each])[1] for each in batch]
    torch.testing.assert_close(together, torch.cat(alone))


def test_a_dummy_run_and_rows_that_others_describe_are_dense() -> None:
    request, rig = random_sequence(BF16, LONG, share=0.1), Rig(BF16, 32, True, 400)
    common = rig.common([request], [rig.write(request.keys, request.values)])
    assert sparse_of(rig.builder.build(0, common)) is None
    assert sparse_of(rig.builder.build(0, common, fast_build=True)) is None


def test_blocks_of_another_owner_are_summarised_anew() -> None:
    first = random_sequence(BF16, LONG, share=0.1, seed=1)
    second = random_sequence(BF16, LONG, share=0.1, seed=2)
    _, wanted = step_of(Rig(BF16, 32, True, 400), [second])
    rig = Rig(BF16, 32, True, 400)
    table = rig.write(first.keys, first.values)
    rig.step([first], [table])
    rig.rows.begin_step({"0"})
    rig.rows.begin_step(set())
    rig.overwrite(table, second.keys, second.values)
    assert torch.equal(rig.step([second], [table]), wanted)


@pytest.mark.parametrize("page", [16, 32])
def test_with_a_basis_too_chosen_pages_hold_what_a_query_looks_for(page: int) -> None:
    request, wanted = random_sequence(BF16, LONG, share=0.1), 777
    keys = request.keys.clone()
    keys[wanted] = 4 * request.queries[0].view(3, 3, 64).mean(1) / BF16.scale**0.5
    moments = Moments(3, 64)
    moments.add_queries(torch.randn(3, 200, 64).numpy())
    by_page = keys[: LONG // page * page].unflatten(0, (-1, page)).transpose(1, 2)
    moments.add_pages(by_page.float().numpy())
    rig = Rig(BF16, page, True, 400, basis=moments.basis())
    skip_where_refused(rig)
    assert isinstance(rig.impl, SparseImpl) and rig.impl.sparse is not None
    rig.impl.sparse.warm(BF16.heads)
    metadata, output = step_of(rig, [Request(keys, request.values, request.queries, 0.1)])
    chosen = chosen_by(sparse_of(metadata), rig, 0, 3)
    assert (chosen == wanted // page).any(dim=1).all() and output.isfinite().all()
