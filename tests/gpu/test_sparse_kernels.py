"""Sparse attention's kernels on a GPU equal the reference; `unit/test_sparse_kernels.py` says the
same in the interpreter."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

pytestmark = pytest.mark.gpu

HND, NHD = (0, 1, 2, 3), (0, 2, 1, 3)
DTYPES = [(torch.float32, 1e-3), (torch.float16, 2e-2), (torch.bfloat16, 1e-1)]


@pytest.mark.parametrize(("dtype", "within"), DTYPES)
@pytest.mark.parametrize("order", [HND, NHD], ids=["HND", "NHD"])
def test_summaries_scores_and_tables_are_the_references(
    dtype: torch.dtype, within: float, order: tuple[int, ...]
) -> None:
    from tests.support import sparse_kernels as kernels

    for page_tokens, dim in ((16, 64), (32, 128)):
        one = kernels.case("cuda", dtype, page_tokens, dim, order)
        kernels.check_summaries(one, "cuda")
        kernels.check_scores(one, "cuda", within)
        kernels.check_tables(one, "cuda")
        kernels.check_unchanged_keys_are_not_summarised_again(one, "cuda")


def test_of_equal_pages_the_earlier_ones_are_taken() -> None:
    from tests.support import sparse_kernels as kernels

    kernels.check_ties("cuda")


@pytest.mark.parametrize("name", ["triton_attention", "flash_attention"])
@pytest.mark.parametrize("order", [HND, NHD], ids=["HND", "NHD"])
def test_vllms_kernels_attend_to_the_chosen_pages(name: str, order: tuple[int, ...]) -> None:
    from headrace_engine.vllm.attention import paged_kernels as attention_kernels
    from tests.support import sparse_kernels as kernels

    one = kernels.case("cuda", torch.bfloat16, 16, 64, order)
    kernels.check_attention(one, "cuda", getattr(attention_kernels, name), 3e-2)
