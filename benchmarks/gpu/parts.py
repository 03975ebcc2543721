"""The questions that only a GPU answers, in order of worth, and the parts that answer them. Pure.

A part is a module of this package with `measured`, `figures` and `markdown`, or tests of
`tests/gpu`. Each runs in a process of its own, at most `limit_s`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

Report = Callable[[dict[str, Any]], None]
"""Takes what a part has found so far, for the case that its time runs out."""


class Measurement(Protocol):
    """A part's module."""

    def measured(self, dry: bool, report: Report) -> dict[str, Any]:
        """Return what was found; with `dry`, on a CPU and with tiny shapes."""
        ...

    def figures(self, found: Mapping[str, Any]) -> dict[str, float]:
        """Return the figures that were found; some are missing if the part was stopped."""
        ...

    def markdown(self, found: Mapping[str, Any]) -> str:
        """Return a table of a complete result."""
        ...


@dataclass(frozen=True)
class Part:
    """A part of the list.

    Attributes:
        name: of the part; of its module, too, unless it has tests.
        question: what it answers.
        limit_s: after which it is stopped.
        targets: by figure, in words; a figure that is not here is not listed.
        tests: arguments of pytest.
        interpreted: whether a dry run needs Triton's interpreter.
        only_on_gpu: whether a dry run only collects its tests; `tests/unit` has the same ones in
            Triton's interpreter.
        open: why it cannot run, if it cannot.
    """

    name: str
    question: str
    limit_s: int
    targets: Mapping[str, str]
    tests: tuple[str, ...] = ()
    interpreted: bool = False
    only_on_gpu: bool = False
    open: str = ""


PASSED: Mapping[str, str] = {"tests_failed": "0"}

PARTS = (
    Part(
        "store_answers",
        "Does an engine with the store give the same log-probabilities after a load, also under a "
        "full graph and beside decodes?",
        120,
        PASSED,
        tests=("tests/gpu/test_kv_engine.py",),
    ),
    Part(
        "sparse_second_runner",
        "Does sparse attention work with vLLM's second model runner, its default on a GPU?",
        120,
        PASSED,
        tests=("tests/gpu/test_sparse_engine.py", "-k", "second"),
        interpreted=True,
    ),
    Part(
        "failed_loads",
        "Are the blocks of a load that fails under a step computed?",
        120,
        PASSED,
        tests=("tests/gpu/test_failed_loads_engine.py",),
    ),
    Part(
        "resume",
        "Does an engine resume a request after another engine's tokens, with both model runners?",
        150,
        PASSED,
        tests=("tests/gpu/test_resume_engine.py",),
    ),
    Part(
        "copies",
        "How fast are loads and saves beside plain copies of pinned memory?",
        90,
        {
            "load_verified_vs_copy": ">= 0.85",
            "save_vs_copy": ">= 0.85",
            "load_fp8_vs_raw": "",
            "load_int4_vs_raw": "",
            "compute_beside_loads_vs_alone": "1",
        },
        interpreted=True,
    ),
    Part(
        "hits",
        "When does a prompt's first token come if its KV is in DRAM or on disk, beside computing "
        "it? What do running requests notice?",
        360,
        {
            "ttft_dram_vs_cold_8192": "<= 0.1",
            "ttft_dram_vs_cold_2048": "",
            "ttft_dram_vs_cold_32768": "",
            "ttft_nvme_vs_cold_8192": "",
            "ttft_nvme_vs_cold_2048": "",
            "ttft_nvme_vs_cold_32768": "",
            "itl_p50_beside_loads_vs_none": "",
            "itl_p99_beside_loads_vs_none": "<= 1.1",
        },
    ),
    Part(
        "files",
        "Are loads from files faster directly into device memory?",
        60,
        {"nvme_direct_vs_host": ""},
        interpreted=True,
    ),
    Part(
        "split",
        "What do prefill and decode cost as two engines on one card over NIXL, against one engine? "
        "What share of decode steps runs outside of full graphs?",
        420,
        {
            "split_ttft_p50_vs_one": "",
            "split_itl_p99_vs_one": "",
            "split_steps_without_full_graph": "0",
            "one_steps_without_full_graph": "",
        },
    ),
    Part(
        "drafting",
        "What does speculative decoding gain at 1 to 256 requests at once? What does vLLM's older "
        "model runner cost, which it needs?",
        420,
        {
            "drafting_1_at_once": "> 1",
            "drafting_4_at_once": "",
            "drafting_16_at_once": "",
            "drafting_64_at_once": "",
            "drafting_256_at_once": ">= 1",
            "first_runner_1_at_once": "",
            "first_runner_256_at_once": "",
        },
    ),
    Part(
        "sparse",
        "How much faster is decode attention over a twentieth of 128K tokens, and where does its "
        "time go?",
        120,
        {
            "sparse_decode_speedup_128k_rows_1": ">= 5",
            "sparse_decode_speedup_128k_rows_4": ">= 5",
            "sparse_decode_speedup_128k_rows_8": ">= 5",
            "sparse_scores_share_128k_rows_1": "",
            "sparse_choice_share_128k_rows_1": "",
        },
        interpreted=True,
    ),
    Part(
        "compression_engine",
        "Does KV cache compression work on a card, with each of vLLM's model runners?",
        240,
        PASSED,
        tests=("tests/gpu/test_compression_engine.py",),
        interpreted=True,
    ),
    Part(
        "offload_engine",
        "Do sparse attention with offload and its kernels work on a card, with both model runners?",
        240,
        PASSED,
        tests=("tests/gpu/test_sparse_offload.py",),
        interpreted=True,
    ),
    Part(
        "offload",
        "What does sparse attention with offload cost on a card? How fast do kernels read and copy "
        "host memory?",
        180,
        {
            "offload_step_vs_in_cache_rows_1": "<= 1.5",
            "offload_step_vs_in_cache_rows_4": "<= 1.5",
            "offload_fetch_vs_plain_copy_rows_1": ">= 0.7",
            "offload_fetch_vs_plain_copy_rows_4": ">= 0.7",
            "offload_stage_vs_plain_copy_rows_1": ">= 0.9",
        },
        interpreted=True,
    ),
    Part(
        "compression",
        "How much faster is decode attention over a quarter of a context, by KV head, and how long "
        "does the choice take?",
        120,
        {
            "compression_decode_speedup_32768_rows_16": ">= 2",
            "compression_decode_speedup_32768_rows_1": "",
            "compression_decode_speedup_8192_rows_16": "",
            "compression_choice_ms_8192": "",
            "compression_choice_ms_32768": "",
        },
        interpreted=True,
    ),
    Part(
        "card",
        "Do 32K tokens of a 7B model fit into 24 GB, and how long does a token take?",
        300,
        {
            "card_24gb_peak_gb.fp8, 32 KV heads": "<= 23.8",
            "card_24gb_token_ms.fp8, 32 KV heads": "<= 120",
            "card_24gb_peak_gb.FusedKV, 32 KV heads in 16 layers": "<= 23.8",
            "card_24gb_token_ms.FusedKV, 32 KV heads in 16 layers": "<= 120",
        },
    ),
    Part(
        "cross_layer",
        "What does mixing two layers' KV cost in decode attention, in Triton and in torch?",
        60,
        {"fused_decode_triton_vs_torch": "<= 1", "fused_decode_triton_vs_one_layer": ""},
        interpreted=True,
    ),
    Part(
        "kernels",
        "Do kernels, copies, streams and clocks of the store and of sparse attention pass?",
        120,
        PASSED,
        tests=(
            "tests/gpu/test_kv_device_kernels.py",
            "tests/gpu/test_device_cache.py",
            "tests/gpu/test_kv_lane.py",
            "tests/gpu/test_kv_direct.py",
            "tests/gpu/test_sparse_kernels.py",
        ),
        only_on_gpu=True,
    ),
    Part(
        "first_runner",
        "Does sparse attention work with vLLM's first model runner?",
        120,
        PASSED,
        tests=("tests/gpu/test_sparse_engine.py", "-k", "first or backend"),
        interpreted=True,
    ),
    Part(
        "cross_layer_answers",
        "Do models that share KV between layers answer as plain torch?",
        240,
        PASSED,
        tests=("tests/gpu/test_cross_layer_engine.py",),
    ),
)
"""In order of worth."""

BY_NAME = {part.name: part for part in PARTS}
