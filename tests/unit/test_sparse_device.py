"""The sparse backend for GPUs on tensors of a CPU, in Triton's interpreter."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.interpreted import INTERPRETED, inside, outside, pass_in_the_interpreter

pytest.importorskip("triton")

WITHIN = 1e-5

if INTERPRETED:
    from tests.support.seen_triton import have_vllm_see_triton

    have_vllm_see_triton()

    from headrace_decode.attention_backend import cuda_runtime
    from headrace_decode.sparse.engine import cuda_step
    from headrace_decode.sparse.kernels.summaries import DeviceSummaries
    from tests.support import sparse_device as device


@pytest.fixture(autouse=INTERPRETED)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    device.use_small_sizes(monkeypatch)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.interpreted(__file__)
@outside
def test_the_backend_for_gpus_holds_in_the_interpreter(
    request: pytest.FixtureRequest,
) -> None:
    pass_in_the_interpreter(request)


@inside
@pytest.mark.parametrize(("order", "prompts"), [((0, 2, 1, 3), True), ((0, 1, 2, 3), False)])
def test_exact_rows_are_vllms_bit_for_bit_beside_sparse_ones(
    order: tuple[int, ...], prompts: bool
) -> None:
    device.check_mixed("cpu", order, WITHIN, prompts)


@inside
def test_a_share_of_one_is_vllms_attention_bit_for_bit() -> None:
    batch = [device.sequence(share=1.0)]
    ours, theirs = device.Rig(True), device.Rig(False)
    assert torch.equal(ours.step(batch), theirs.step(batch))


@inside
def test_shared_blocks_are_read_and_not_edited() -> None:
    device.check_shared_blocks("cpu", WITHIN)


@inside
def test_blocks_of_another_owner_are_summarised_anew() -> None:
    device.check_overwritten_blocks("cpu", WITHIN)


@inside
def test_rows_that_are_computed_one_after_another_do_not_touch_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    batch = [device.sequence(tokens, 0.4, seed=tokens) for tokens in (device.LONG, 112, 129)]
    together = device.Rig(True).step(batch)
    monkeypatch.setattr(cuda_step, "ROWS_AT_ONCE", 2)
    rig = device.Rig(True)
    metadata = rig.metadata(batch, [rig.write(one) for one in batch])
    assert not metadata.vllms and len(metadata.sparse._parts) == 2
    torch.testing.assert_close(rig.forward(batch, metadata), together, rtol=0, atol=WITHIN)


@inside
def test_a_row_is_dense_until_its_pages_are_summarised() -> None:
    one, rig = device.sequence(share=0.4), device.Rig(True, step_pages=4)
    table = rig.write(one)
    made = []
    for _ in range(3):
        metadata = rig.metadata([one], [table])
        made.append((metadata.sparse.count, len(metadata.sparse._due)))
        output = rig.forward([one], metadata)
    assert made == [(0, 4), (0, 4), (1, 2)], "10 full pages"
    wanted = device.reference(one, rig.basis)
    torch.testing.assert_close(output[0].double(), wanted, rtol=0, atol=WITHIN)


@inside
def test_a_dummy_run_and_rows_that_others_describe_are_vllms() -> None:
    one, rig = device.sequence(share=0.2), device.Rig(True)
    table = rig.write(one)
    rig.rows = None  # type: ignore[assignment]
    metadata = rig.metadata([one], [table])
    assert type(metadata).__name__ == "TritonAttentionMetadata"


@inside
def test_a_card_gives_layers_their_summaries_of_memory_that_the_cache_leaves() -> None:
    rig = device.Rig(True, blocks=50)
    rig.impl.sparse = None
    mine = cuda_runtime.CudaSparseRuntime([rig.basis], device.PAGE, device.SHAPE.heads, 40)
    page = rig.cache[0].nbytes
    available = mine.scratch_bytes + 10**6
    spec = SimpleNamespace(block_size=device.PAGE, page_size_bytes=page)
    blocks = mine.cache_bytes(available, spec) // page
    summaries = DeviceSummaries(blocks, device.PAGE, rig.basis, "cpu")
    assert 0.99 * 10**6 < blocks * page + summaries.nbytes <= 10**6
    module: Any = SimpleNamespace(kv_cache=rig.cache, impl=rig.impl)
    before = rig.cache.clone()
    assert mine.bind([module]) == (rig.impl.sparse.summaries.nbytes, None)
    assert torch.equal(before, rig.cache)
    with pytest.raises(ValueError, match="16 tokens"):
        cuda_runtime.CudaSparseRuntime([rig.basis], 32, device.SHAPE.heads, 40).bind([module])
