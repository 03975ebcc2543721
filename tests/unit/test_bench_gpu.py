"""The GPU page expects what its program computes; without a GPU nothing is measured."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import expected

ROOT = Path(__file__).parents[2]


def test_the_page_has_the_programs_table() -> None:
    page = (ROOT / "docs" / "gpu.md").read_text()
    assert expected.markdown() in page


def test_a_token_of_llama_3_8b_has_128_kib_of_kv() -> None:
    assert expected.TOKEN_BYTES == 131_072


def test_the_slowest_link_decides() -> None:
    h100, gh200 = expected.NODES
    assert expected.load_s(gh200, "dram", 32768) < expected.load_s(h100, "dram", 32768)
    assert expected.load_s(gh200, "nvme", 32768) == expected.load_s(h100, "nvme", 32768)
    size = 32768 * expected.TOKEN_BYTES
    assert expected.load_s(h100, "nvme", 32768) == pytest.approx(size / (0.85 * 14e9), rel=1e-3)


def test_short_prompts_are_computed() -> None:
    node = expected.NODES[0]
    pays = expected.pays_from(node, "dram")
    assert pays is not None
    assert expected.load_s(node, "dram", pays - 16) >= expected.compute_s(pays - 16)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
def test_without_a_gpu_the_tests_for_one_end_with_one_line() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/gpu"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "there is no GPU" in done.stdout
    wanted = int(done.stdout.partition("there is no GPU, and ")[2].split()[0])
    assert wanted >= 60
