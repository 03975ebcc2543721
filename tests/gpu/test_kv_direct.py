"""Reads from files straight into GPU memory, where the machine has GPUDirect Storage."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")
pytest.importorskip("nixl")

from headrace_engine.connector.loading.file_loader import DIRECT_BACKEND
from headrace_kvstore.nvme.nixl_file_io import NixlFileIo
from headrace_kvstore.nvme.segment import Location
from tests.support.direct_reads import Direct
from tests.unit.test_kv_connector_files import BLOCKS, Engine, engines, places

__all__ = ["engines", "places"]  # fixtures

pytestmark = pytest.mark.gpu


def test_blocks_have_the_same_bytes_whichever_way_was_faster(
    engines: tuple[Engine, Engine], places: dict[bytes, Location]
) -> None:
    reads = Direct(DIRECT_BACKEND, "cuda")
    for _ in range(2):
        source = reads.load(places, list(range(BLOCKS)))
        reads.tried()
        assert not source.bad.any()
        for block in range(BLOCKS):
            assert reads.content(block) == engines[0].content(block)
            for tensor in reads.tensors.values():
                tensor[block] = 0
    assert reads.tier.why
    reads.tier.close()


def test_direct_reads_have_the_bytes_of_the_files(
    engines: tuple[Engine, Engine],
    places: dict[bytes, Location],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from headrace_engine.connector.loading.read_paths import GdsPath, PathBenchmark

    try:
        NixlFileIo(DIRECT_BACKEND, "VRAM").close()
    except RuntimeError as error:
        pytest.skip(str(error))
    monkeypatch.setattr(PathBenchmark, "choice", lambda trial: ("direct", trial.failed))
    reads = Direct(DIRECT_BACKEND, "cuda")
    reads.load(places, [0])
    reads.tried()
    source = reads.load(places, list(range(BLOCKS)))
    assert isinstance(source.way, GdsPath)
    assert not source.bad.any()
    assert [reads.content(n) for n in range(BLOCKS)] == [
        engines[0].content(n) for n in range(BLOCKS)
    ]
    reads.tier.close()
