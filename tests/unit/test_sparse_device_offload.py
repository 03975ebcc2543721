"""Offloaded requests in the sparse backend for GPUs, on tensors of a CPU, in Triton's
interpreter."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.interpreted import INTERPRETED, inside, outside, pass_in_the_interpreter

pytest.importorskip("triton")

HND, NHD = (0, 1, 2, 3), (0, 2, 1, 3)
WITHIN = 1e-5

if INTERPRETED:
    from tests.support.seen_triton import have_vllm_see_triton

    have_vllm_see_triton()

    from headrace_decode.attention_backend.cuda_runtime import CudaSparseRuntime
    from headrace_decode.attention_backend.runtime import RUNTIME
    from headrace_decode.compression.engine.context_scorer import RereadRows
    from headrace_decode.compression.engine.metadata import CompressionMetadata
    from headrace_decode.sparse.kernels.summaries import DeviceSummaries
    from headrace_decode.sparse.offload.pinned_memory import allocate_pinned
    from tests.support import compression_device, sparse_device
    from tests.support import offloaded_device as offloaded
    from tests.support.sparse_device import LONG, Rig, sequence


@pytest.fixture(autouse=INTERPRETED)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    sparse_device.use_small_sizes(monkeypatch)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.interpreted(__file__)
@outside
def test_offloaded_rows_hold_in_the_interpreter(request: pytest.FixtureRequest) -> None:
    pass_in_the_interpreter(request)


@inside
@pytest.mark.parametrize(("tokens", "order"), [(170, HND), (176, NHD), (177, NHD)])
def test_a_sparse_row_attends_as_if_its_kv_were_in_the_cache(
    tokens: int, order: tuple[int, ...]
) -> None:
    offloaded.check_sparse_rows("cpu", order, tokens)


@inside
@pytest.mark.parametrize(
    ("order", "queries", "count"), [(HND, 1, 1), (NHD, 5, 3), (HND, 40, 1), (NHD, 1, 2)]
)
def test_a_dense_row_of_which_most_has_left_is_vllms_bit_for_bit(
    order: tuple[int, ...], queries: int, count: int
) -> None:
    offloaded.check_staged_rows("cpu", order, queries, count)


@inside
def test_rows_of_all_kinds_in_one_batch_do_not_change_each_other() -> None:
    offloaded.check_rows_beside_others("cpu", WITHIN)


@inside
def test_an_answer_grows_and_its_pages_leave_the_cache() -> None:
    offloaded.check_growth("cpu", 20)


@inside
def test_host_memory_is_given_back_and_written_again() -> None:
    offloaded.check_host_memory("cpu")


@inside
def test_an_engine_takes_the_memory_that_it_has_left_out_of_the_cache() -> None:
    rig, pages, host_pages = sparse_device.Rig(True, blocks=30), 16, 24
    mine = CudaSparseRuntime([rig.basis], sparse_device.PAGE, sparse_device.SHAPE.heads, pages)
    page = rig.cache[0].nbytes
    module: Any = SimpleNamespace(kv_cache=rig.cache, impl=rig.impl)
    pinned = allocate_pinned(host_pages * page, torch.device("cpu"))
    taken, memory = mine.bind([module], pinned, host_pages)
    assert memory is not None and taken == rig.impl.sparse.summaries.nbytes
    assert memory.host_bytes == pinned.nbytes and memory.staging_bytes == 2 * pages * page
    assert memory.counts.tolist() == [0, 0], "kernels were compiled, and nothing was chosen"
    available = mine.scratch_bytes + 10**7
    spec = SimpleNamespace(block_size=sparse_device.PAGE, page_size_bytes=page)
    blocks = mine.cache_bytes(available, spec, host_pages) // page
    summaries = DeviceSummaries(blocks + host_pages, sparse_device.PAGE, rig.basis, "cpu").nbytes
    tables = sparse_device.SHAPE.kv_heads * (8 * blocks + 4 * host_pages)
    assert 0.8 * 10**7 < blocks * page + summaries + tables + memory.staging_bytes < 10**7


@inside
def test_rows_of_all_kinds_attend_in_one_step_as_each_would_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A compressed row, sparse rows with and without offload, a staged row, a row whose queries
    score a context, and one that is vLLM's."""
    rig, cached, plain = offloaded.OffloadingRig(), Rig(True), Rig(False)
    batch = [
        sequence(LONG, seed=1),
        sequence(LONG, offloaded.SHARE, seed=2),
        sequence(LONG, offloaded.SHARE, seed=3),
        sequence(130, queries=5, seed=4),
        sequence(130, queries=19, seed=5),
        sequence(90, seed=6),
    ]
    names = {1: "1", 3: "3"}
    tables = [
        rig.put(one, names[number]) if number in names else rig.write(one)
        for number, one in enumerate(batch)
    ]
    context = 10 * sparse_device.PAGE
    room = [rig._free.pop() for _ in range(3)]
    scale = sparse_device.SHAPE.scale
    worker = compression_device.one_layer_worker(rig.cache, tables[0], context, room, scale)
    again = RereadRows("0", context, 120, context)
    worker.begin_step((), (), CompressionMetadata(rereads={"4": again}))

    monkeypatch.setattr(RUNTIME, "compression", worker)
    alone = rig.metadata(batch[:1], tables[:1])
    assert alone.dropped is not None and not alone.vllms
    assert (alone.sparse, alone.offloaded, alone.staged) == (None, None, None)
    kept = rig.forward(batch[:1], alone)
    monkeypatch.setattr(RUNTIME, "compression", worker)
    metadata = rig.metadata(batch, tables)
    assert metadata.vllms and metadata.seq_lens.tolist() == [1, 1, 1, 5, 130, 90]
    monkeypatch.setattr(RUNTIME, "compression", worker)
    found = rig.forward(batch, metadata)

    wanted, dense = cached.step(batch), plain.step(batch)
    assert torch.equal(found[0], kept[0])
    assert not torch.allclose(found[0], dense[0], rtol=0, atol=WITHIN)
    assert torch.equal(found[1:3], wanted[1:3])
    torch.testing.assert_close(found[3:8], dense[3:8], rtol=0, atol=WITHIN)
    assert torch.equal(found[8:], dense[8:])
    [(queries, _)] = worker.scorers["0"]._came[0]
    assert torch.equal(queries, batch[4].queries[9:]), "positions 120 to 129"
