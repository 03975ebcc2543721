"""The GPU page expects what its program computes; without a GPU nothing is measured."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import expected, files, split

ROOT = Path(__file__).parents[2]
SPLIT = ["ttft_p50", "ttft_p99", "itl_p50", "itl_p99", "itl_mean"]
SHARES = {"one.without_full_graph": 0.5, "two.without_full_graph": 0.25}


def test_the_page_has_the_programs_table() -> None:
    page = (ROOT / "docs" / "gpu-measurements.md").read_text()
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


def test_the_split_is_told_as_two_engines_over_one() -> None:
    times = {f"one.{name}_s": 0.1 for name in SPLIT} | {f"two.{name}_s": 0.2 for name in SPLIT}
    found = {"running": 8, "prompt_tokens": 4096, "every_s": 0.5, "alone_s": 0.25, **times}
    found |= SHARES
    figures = split.figures(found)
    assert figures.pop("split_steps_without_full_graph") == 0.25
    assert figures.pop("one_steps_without_full_graph") == 0.5
    assert set(figures.values()) == {2.0}
    assert "| two | 200.0 | 200.0 | 200.0 | 200.0 | 200.0 | 25% |" in split.markdown(found)


def test_loads_from_disk_are_told_with_what_the_direct_way_lacks() -> None:
    found = {"blocks": 512, "host": 4.0, "direct": 6.0, "lacking": ""}
    assert files.figures(found) == {"nvme_direct_vs_host": 1.5}
    assert "| 512 | 4.00 | 6.00 |" in files.markdown(found)
    one = {"blocks": 512, "host": 4.0, "lacking": "no plugin"}
    assert files.figures(one) == {}
    assert "No direct reads: no plugin." in files.markdown(one)
