"""Sparse attention's kernels equal the reference, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from tests.support.interpreted import (
    INTERPRETED,
    compile_for_cards,
    inside,
    outside,
    pass_in_the_interpreter,
)

pytest.importorskip("triton")

HND, NHD = (0, 1, 2, 3), (0, 2, 1, 3)

if INTERPRETED:
    from tests.support import sparse_kernels as kernels
    from tests.support.seen_triton import have_vllm_see_triton


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.interpreted(__file__)
@outside
def test_kernels_equal_the_reference_in_the_interpreter(
    request: pytest.FixtureRequest,
) -> None:
    pass_in_the_interpreter(request)


@pytest.mark.skipif(INTERPRETED, reason="the interpreter does not compile")
def test_kernels_compile_for_cards() -> None:
    from headrace_decode.sparse.kernels import page_selection, summaries

    of_page = {"TOKENS": 16, "DIM": 128, "COORDINATES": 20}
    scoring = of_page | {"GROUP": 4, "GROUP_PADDED": 16, "PADDED": 32, "PAGES": 16}
    making = {"PADDED": 16, "WIDE": False, "ROUNDS": 3, "PRODUCTS": 4}
    compile_for_cards(summaries._refresh, TYPES | PAGES_64 | FOUND_FP32, of_page | making)
    compile_for_cards(page_selection._score, TYPES | FOUND_FP32, scoring)
    choosing = {"GROUP": 4, "FIRST": 1, "LAST": 1, "SIZE": 1024}
    for places in (True, False):
        compile_for_cards(page_selection._choose, TYPES, choosing | {"PLACES": places})


TYPES = {
    **dict.fromkeys(("keys", "query"), "*bf16"),
    **dict.fromkeys(
        ("scales", "origin", "into", "back", "weights", "logits"),
        "*fp32",
    ),
    **dict.fromkeys(("counts", "chosen", "newest", "pages", "found"), "*i32"),
    **{"codes": "*u8", "sums": "*i64", "scale": "fp32"},
}
PAGES_64 = {"pages": "*i64", "slots": "*i64"}
FOUND_FP32 = {"found": "*fp32"}


@inside
@pytest.mark.parametrize(
    ("dtype", "order"), [(torch.float32, NHD), (torch.float16, HND), (torch.bfloat16, NHD)]
)
def test_summaries_are_the_cpus(dtype: torch.dtype, order: tuple[int, ...]) -> None:
    kernels.check_summaries(kernels.case("cpu", dtype, order=order), "cpu")


@inside
def test_summaries_of_larger_pages_and_heads_are_the_cpus() -> None:
    kernels.check_summaries(kernels.case("cpu", torch.float16, page_tokens=32, dim=64), "cpu")


@inside
def test_only_changed_keys_are_summarised_again() -> None:
    one = kernels.case("cpu", torch.bfloat16)
    kernels.check_unchanged_keys_are_not_summarised_again(one, "cpu")


@inside
@pytest.mark.parametrize(("dtype", "within"), [(torch.float32, 1e-4), (torch.float16, 2e-2)])
def test_scores_are_what_summaries_say(dtype: torch.dtype, within: float) -> None:
    kernels.check_scores(kernels.case("cpu", dtype), "cpu", within)


@inside
def test_each_kv_head_takes_the_pages_of_the_highest_scores() -> None:
    kernels.check_tables(kernels.case("cpu", torch.float32, order=NHD), "cpu")


@inside
def test_of_equal_pages_the_earlier_ones_are_taken() -> None:
    kernels.check_ties("cpu")


@inside
def test_vllms_kernel_attends_to_the_chosen_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    have_vllm_see_triton()
    from headrace_engine.vllm.attention import paged_kernels as attention_kernels

    monkeypatch.setattr(attention_kernels, "SEGMENTS", 4)
    one = kernels.case("cpu", torch.float32, order=NHD)
    kernels.check_attention(one, "cpu", attention_kernels.triton_attention, 1e-4)
