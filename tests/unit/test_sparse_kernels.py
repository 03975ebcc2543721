"""Sparse attention's kernels equal the reference, in Triton's interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.interpreted import INTERPRETED, inside, outside, pass_in_the_interpreter

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
    _compile(summaries._refresh, of_page | making)
    _compile(page_selection._score, scoring)
    _compile(page_selection._choose, {"GROUP": 4, "FIRST": 1, "LAST": 1, "SIZE": 1024})


TYPES = {
    **dict.fromkeys(("keys", "query"), "*bf16"),
    **dict.fromkeys(
        ("scales", "origin", "into", "back", "weights", "logits"),
        "*fp32",
    ),
    **dict.fromkeys(("counts", "chosen", "newest"), "*i32"),
    **{"codes": "*u8", "sums": "*i64", "scale": "fp32"},
}


def _compile(kernel: Any, constants: dict[str, Any]) -> None:
    """To machine code of an H100."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    types = TYPES | {"pages": "*i64" if "WIDE" in constants else "*i32"}
    types["found"] = "*i32" if "SIZE" in constants else "*fp32"
    types |= dict.fromkeys(constants, "constexpr")
    signature = {name: types.get(name, "i32") for name in kernel.arg_names}
    values = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, signature, constexprs=values)
    assert triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["cubin"]


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
