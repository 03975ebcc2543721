"""The store's kernels for GPUs give the CPU's bytes, in Triton's interpreter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.interpreted import INTERPRETED, inside, outside, pass_in_the_interpreter

pytest.importorskip("triton")

from headrace_kvstore.blocks.sharding import Shard
from headrace_kvstore.codec import LayerShape, Order

DTYPES = ["float32", "bfloat16", "float16"]
HERE = Path(__file__).parent
CACHES = [
    f"{HERE}/test_kv_layout_vllm.py::test_the_device_cache_{what}"
    for what in (
        "moves_the_same_bytes_as_the_host_cache",
        "takes_kernels_with_smaller_blocks",
        "has_some_parts_of_each_layer",
        "has_layers_of_two_groups",
        "has_pages_of_a_pool",
    )
]
SMALL = LayerShape(2, 16, 32, "bfloat16", Order.HND)

if INTERPRETED:
    from tests.support import device_kernels as kernels
    from tests.support.coded_device import check_coded_against_host


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.interpreted(__file__, *CACHES, str(HERE / "test_kv_read_paths.py"))
@outside
def test_kernels_equal_the_cpu_in_the_interpreter(request: pytest.FixtureRequest) -> None:
    pass_in_the_interpreter(request)


@pytest.mark.skipif(INTERPRETED, reason="the interpreter does not compile")
def test_kernels_compile_for_cards() -> None:
    from headrace_kvstore.device import checksum_kernels as sums
    from headrace_kvstore.device import codec_kernels
    from headrace_kvstore.device import number_formats as numbers

    for pieces in (1, 8):
        _compile(sums._copy_sum, {"PIECES": pieces, "PIECE_WORDS": 1024, "COPY": True, "ROWS": 64})
    for dtype in DTYPES:
        fp8 = {"FORMAT": dtype, "PLACES": 16, "PADDED": 16, "UNITS": 128}
        _compile(codec_kernels._fp8_encode, fp8 | {"LIMIT": 2**30, "K_MIN": -15}, numbers.EXACT)
        _compile(codec_kernels._fp8_decode, fp8, numbers.EXACT)
        int4 = {"FORMAT": dtype, "GROUPS": 4, "HALF": 16, "PADDED": 16, "COUNT": 64, "UNITS": 64}
        _compile(codec_kernels._int4_encode, int4 | {"LIMIT": 2**30}, numbers.EXACT)
        _compile(codec_kernels._int4_decode, int4, numbers.EXACT)


POINTERS = {
    **dict.fromkeys(("dst", "src", "seeds", "sums", "layers"), "*i64"),
    **{"stored": "*u8", "unfit": "*i32", "length": "i64"},
}


def _compile(kernel: Any, constants: dict[str, Any], options: Any = None) -> None:
    """To machine code of an H100."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    types = POINTERS | dict.fromkeys(constants, "constexpr")
    signature = {name: types.get(name, "i32") for name in kernel.arg_names}
    values = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, signature, constexprs=values)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert made.asm["cubin"]
    if options is not None:
        assert "fma.rn.f32" not in made.asm["ptx"], "a fused product rounds once less"


@inside
@settings(max_examples=12)
@given(
    st.integers(1, 3), st.integers(1, 4), st.integers(1, 80).map(lambda n: 4 * n), st.integers(0)
)
def test_copies_and_sums_are_the_cpus(runs: int, pieces: int, size: int, seed: int) -> None:
    kernels.check_copy_sum("cpu", runs, pieces, size, seed)


@inside
@pytest.mark.parametrize("size", [64 * 64, 64 * 64 + 4, 3 * 64 * 64 - 60])
def test_long_runs_are_summed_in_parts(size: int) -> None:
    kernels.check_copy_sum("cpu", 2, 1, size, seed=2)


@inside
def test_pieces_that_are_no_whole_words_are_refused() -> None:
    one = torch.zeros((1, 1), dtype=torch.int64)
    with pytest.raises(ValueError, match="whole words"):
        kernels.copy_sum(None, one, 6, one[0])


shapes = st.builds(
    LayerShape,
    st.integers(1, 3),
    st.sampled_from([8, 16, 24, 32, 64]),
    st.sampled_from([16, 24, 32, 64]),
    st.sampled_from(DTYPES),
    st.sampled_from([Order.HND, Order.NHD]),
)


@inside
@settings(max_examples=10)
@given(shapes, st.integers(0, 2**31))
def test_fp8_is_the_cpus(shape: LayerShape, seed: int) -> None:
    kernels.check_codec("cpu", "fp8", shape, seed)


@inside
@settings(max_examples=10)
@given(shapes, st.integers(0, 2**31))
def test_int4_is_the_cpus(shape: LayerShape, seed: int) -> None:
    kernels.check_codec("cpu", "int4", shape, seed)


@inside
@settings(max_examples=5)
@given(st.sampled_from(["fp8", "int4"]), st.sampled_from(DTYPES), st.integers(0, 2**31))
def test_any_bytes_decode_to_the_cpus_numbers(name: str, dtype: str, seed: int) -> None:
    kernels.check_any_bytes_decode("cpu", name, LayerShape(2, 16, 32, dtype, Order.HND), seed)


@inside
def test_nans_stay_nans() -> None:
    kernels.check_nans_stay("cpu")


@inside
@pytest.mark.parametrize("name", ["fp8", "int4"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 2.0**126])
def test_what_the_cpu_refuses_is_refused(name: str, value: float) -> None:
    kernels.check_unfit("cpu", name, SMALL, value)


@inside
@pytest.mark.parametrize("name", ["fp8", "int4"])
@pytest.mark.parametrize("order", [Order.HND, Order.NHD])
def test_the_device_cache_stores_the_codes_of_the_cpu(name: str, order: Order) -> None:
    check_coded_against_host("cpu", name, LayerShape(2, 16, 32, "bfloat16", order))


@inside
def test_a_rank_stores_its_share_of_each_layer_under_a_codec() -> None:
    check_coded_against_host("cpu", "fp8", SMALL, Shard(3, 1, 1))
