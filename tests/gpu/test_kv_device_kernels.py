"""The store's kernels on a GPU give the CPU's bytes; `unit/test_kv_device_kernels.py` says the same
in the interpreter."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from headrace_kvstore.codec import LayerShape, Order

pytestmark = pytest.mark.gpu

DTYPES = ["float32", "bfloat16", "float16"]
ORDERS = [Order.HND, Order.NHD]
SIZES = [(1, 16, 64), (4, 16, 128), (8, 128, 128)]
"""KV heads, tokens of a block, head size."""


@pytest.mark.parametrize("pieces", [1, 4])
@pytest.mark.parametrize("piece_bytes", [4, 60, 4096, 32768])
def test_copies_and_sums_are_the_cpus(pieces: int, piece_bytes: int) -> None:
    from tests.support import device_kernels as kernels

    for seed in range(3):
        kernels.check_copy_sum("cuda", 37, pieces, piece_bytes, seed)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["fp8", "int4"])
def test_codecs_are_the_cpus(
    name: str, dtype: str, order: Order, size: tuple[int, int, int]
) -> None:
    from tests.support import device_kernels as kernels

    kernels.check_codec("cuda", name, LayerShape(*size, dtype, order), seed=3, blocks=5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["fp8", "int4"])
def test_any_bytes_decode_to_the_cpus_numbers(name: str, dtype: str) -> None:
    from tests.support import device_kernels as kernels

    for seed in range(5):
        shape = LayerShape(2, 16, 64, dtype, Order.HND)
        kernels.check_any_bytes_decode("cuda", name, shape, seed)


def test_nans_stay_nans() -> None:
    from tests.support import device_kernels as kernels

    kernels.check_nans_stay("cuda")


@pytest.mark.parametrize("name", ["fp8", "int4"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 2.0**126])
def test_what_the_cpu_refuses_is_refused(name: str, value: float) -> None:
    from tests.support import device_kernels as kernels

    kernels.check_unfit("cuda", name, LayerShape(2, 16, 32, "bfloat16", Order.HND), value)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", ["fp8", "int4"])
def test_a_cache_stores_the_codes_of_the_cpu(name: str, order: Order) -> None:
    from tests.support.coded_device import check_coded_against_host

    check_coded_against_host("cuda", name, LayerShape(4, 16, 64, "bfloat16", order))
