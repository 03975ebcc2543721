"""Kernels that fetch pages of offloaded requests equal a naive model, in Triton's interpreter."""

from __future__ import annotations

from typing import Any

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

if INTERPRETED:
    from hypothesis import given, settings
    from hypothesis import strategies as st

    from tests.support import page_residency as residency

HND, NHD = (0, 1, 2, 3), (0, 2, 1, 3)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.interpreted(__file__)
@outside
def test_pages_are_fetched_as_by_a_naive_model_in_the_interpreter(
    request: pytest.FixtureRequest,
) -> None:
    pass_in_the_interpreter(request)


@outside
def test_kernels_compile_for_cards() -> None:
    from headrace_decode.sparse.kernels import residency as kernels

    page: dict[str, Any] = {"TOKENS": 32, "ROW": 64}
    addresses = dict.fromkeys(("sources", "targets"), "*i64")
    pairs = {"from_": "*i64", "to": "*i64", "counts": "*i64"}
    tables = ("positions", "blocks", "host", "gone", "chosen", "newest", "slot_of", "used_at")
    more = ("found", "missing", "missed", "victims", "slots", "slot_counts", "page_in")
    types = addresses | pairs | dict.fromkeys((*tables, *more), "*i32")
    compile_for_cards(kernels._copy, types, page)
    compile_for_cards(kernels._look_up, types, {"SIZE": 1024})
    compile_for_cards(kernels._evict, types, {"SIZE": 1024})
    compile_for_cards(kernels._fetch, types, page)


@inside
@pytest.mark.parametrize(
    ("order", "dtype"), [(HND, torch.float16), (NHD, torch.float32), (NHD, torch.bfloat16)]
)
def test_pages_are_copied_byte_for_byte_both_ways(
    order: tuple[int, ...], dtype: torch.dtype
) -> None:
    residency.check_copies("cpu", order, dtype)


@inside
def test_the_bytes_of_a_page_must_lie_together() -> None:
    whole = torch.zeros(3, 4, 16, 64)
    with pytest.raises(ValueError, match="do not lie together"):
        residency.PageLayout.of(whole[:, ::2])
    assert residency.PageLayout.of(torch.zeros(3, 2, 4, 16, 64)[:, 0]).words == 4 * 16 * 32


if INTERPRETED:

    @settings(max_examples=6, deadline=None)
    @given(st.integers(0, 10_000), st.sampled_from([HND, NHD]), st.integers(0, 15))
    def test_tables_and_bytes_are_those_of_a_naive_lru_cache(
        seed: int, order: tuple[int, ...], gone: int
    ) -> None:
        residency.check_steps("cpu", order, seed, 3, (gone, 15 - gone))


@inside
def test_host_memory_that_another_request_gets_is_not_found_in_old_slots() -> None:
    residency.check_pages_of_host_memory_that_others_get("cpu")
