"""Summaries of pages, the scores made of them, and the choice."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from llvmlite import ir
from llvmlite.binding import get_host_cpu_features
from numba import njit, types
from numba.extending import intrinsic
from torch import Tensor

from headrace_decode.sparse.basis import Basis
from headrace_decode.sparse.page_scores import score_pages
from headrace_decode.sparse.page_selection import select_pages
from headrace_decode.sparse.simd_dot import AVX2, VNNI, Dot
from headrace_decode.sparse.summaries import Summaries
from headrace_decode.sparse.summary_layout import SummaryLayout
from headrace_lab.sparse.moments import Moments
from headrace_lab.sparse.reference import Coordinates, Form
from tests.support import sparse_summaries as stored

HEADS = 2
SHAPES = st.sampled_from(
    [(16, 64, 4), (32, 64, 4), (16, 128, 4), (16, 64, 2), (8, 8, 1), (6, 24, 5)]
)
GROUPS = {16: 3, 32: 4, 8: 1, 6: 8}


def keys_of(seed: int, pages: int, tokens: int, dim: int) -> Tensor:
    """Pages around means of their own, with a few directions that matter."""
    draw = torch.Generator().manual_seed(seed)
    mean = 2 * torch.randn(pages, HEADS, 1, dim, generator=draw)
    weights = torch.randn(pages, HEADS, tokens, 3, generator=draw)
    few = weights @ torch.randn(pages, HEADS, 3, dim, generator=draw)
    return mean + few + 0.2 * torch.randn(pages, HEADS, tokens, dim, generator=draw)


def basis_of(keys: Tensor, rank: int, queries: Tensor | None = None) -> Basis:
    moments = Moments(HEADS, keys.shape[-1])
    moments.add_pages(keys.numpy())
    if queries is None:
        queries = torch.randn(
            HEADS, 500, keys.shape[-1], generator=torch.Generator().manual_seed(0)
        )
    moments.add_queries(queries.numpy())
    return moments.basis(rank)


def unpacked(summaries: Summaries, page: int, head: int) -> tuple[Tensor, Tensor]:
    """Mean [dim], less the basis's origin, and what the page's keys add to it [tokens, dim]."""
    codes, scales = summaries.codes[head, page], summaries.scales[head, page]
    return stored.unpacked(summaries.layout, summaries.basis, codes, scales, head)


class TestSummaries:
    @given(seed=st.integers(0, 1000), shape=SHAPES)
    @settings(max_examples=20)
    def test_hold_the_energy_that_singular_vectors_hold(
        self, seed: int, shape: tuple[int, int, int]
    ) -> None:
        tokens, dim, rank = shape
        keys = keys_of(seed, 5, tokens, dim)
        summaries = Summaries(7, HEADS, tokens, dim, rank)
        pages = np.array([6, 0, 3, 1, 5])
        summaries.put(pages, keys)
        for n, page in enumerate(pages):
            for head in range(HEADS):
                mean, rest = unpacked(summaries, page, head)
                exact = keys[n, head].mean(0)
                centred = keys[n, head] - exact
                assert (mean - exact).abs().max() <= exact.abs().max() / 14 * 1.001
                values = torch.linalg.svdvals(centred).square()
                lost = (centred - rest).square().sum() / values.sum()
                # 4 bits: steps of a seventh of the largest, in two factors of each product. Over
                # all of these seeds, at most 0.115 for pages of 8 x 8, 0.08 for others.
                assert lost <= values[rank:].sum() / values.sum() + 0.12

    def test_of_equal_keys_are_their_mean(self) -> None:
        summaries = Summaries(1, HEADS, 16, 64)
        keys = torch.randn(1, HEADS, 1, 64).expand(-1, -1, 16, -1)
        summaries.put(np.array([0]), keys)
        mean, rest = unpacked(summaries, 0, 1)
        assert (mean - keys[0, 1, 0]).abs().max() <= keys[0, 1, 0].abs().max() / 14 * 1.001
        assert rest.abs().max() < 1e-5

    @pytest.mark.parametrize("factor", [1e-12, 1e-3, 1e3, 1e15])
    def test_do_not_depend_on_the_keys_size(self, factor: float) -> None:
        keys, summaries = keys_of(1, 1, 16, 64), Summaries(2, HEADS, 16, 64)
        summaries.put(np.array([0]), keys)
        summaries.put(np.array([1]), keys * factor)
        assert (unpacked(summaries, 1, 0)[0] / factor).allclose(unpacked(summaries, 0, 0)[0])
        a, b = (unpacked(summaries, page, 0)[1] for page in (1, 0))
        torch.testing.assert_close(a / factor, b, rtol=1e-3, atol=1e-3)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
    def test_take_keys_of_any_dtype(self, dtype: torch.dtype) -> None:
        keys, summaries = keys_of(2, 1, 16, 64).to(dtype), Summaries(2, HEADS, 16, 64)
        summaries.put(np.array([0]), keys)
        summaries.put(np.array([1]), keys.float().numpy())
        assert (summaries.codes[:, 0] == summaries.codes[:, 1]).all()

    def test_take_a_tenth_of_the_keys_bytes(self) -> None:
        summaries = Summaries(100, HEADS, 16, 64)
        assert summaries.nbytes / (100 * HEADS * 16 * 64 * 2) == summaries.layout.bytes_vs_k <= 0.12

    def test_of_other_pages_stay(self) -> None:
        summaries = Summaries(3, HEADS, 16, 64)
        summaries.put(np.array([0, 1, 2]), keys_of(3, 3, 16, 64))
        before = summaries.codes.copy()
        summaries.put(np.array([1]), keys_of(4, 1, 16, 64))
        assert (summaries.codes[:, [0, 2]] == before[:, [0, 2]]).all()
        assert (summaries.codes[:, 1] != before[:, 1]).any()

    @pytest.mark.parametrize("page", [-1, 3])
    def test_have_no_page_outside_their_capacity(self, page: int) -> None:
        summaries = Summaries(3, HEADS, 16, 64)
        with pytest.raises(IndexError, match="must be 0 to 2"):
            summaries.put(np.array([page]), keys_of(0, 1, 16, 64))
        with pytest.raises(IndexError, match="must be 0 to 2"):
            score_pages(summaries, np.array([page]), np.zeros((HEADS, 3, 64), np.float32), 1.0)

    def test_refuse_other_shapes(self) -> None:
        summaries = Summaries(3, HEADS, 16, 64)
        with pytest.raises(ValueError, match="must be"):
            summaries.put(np.array([0]), keys_of(0, 1, 32, 64))
        with pytest.raises(ValueError, match="must be"):
            score_pages(summaries, np.array([0]), np.zeros((HEADS, 3, 32), np.float32), 1.0)

    @pytest.mark.parametrize(
        "shape",
        [
            (15, 64, 4, 0),
            (16, 60, 4, 0),
            (16, 64, 0, 20),
            (16, 64, 16, 0),
            (16, 64, 1, 22),
            (16, 64, 1, 68),
        ],
    )
    def test_have_no_layout_for_some_shapes(self, shape: tuple[int, int, int, int]) -> None:
        with pytest.raises(ValueError):
            SummaryLayout(*shape)


class TestABasis:
    KEYS = keys_of(7, 40, 16, 64)

    def test_of_all_coordinates_loses_nothing_but_precision(self) -> None:
        basis = basis_of(self.KEYS, 64)
        summaries = Summaries(40, HEADS, 16, 64, basis=basis)
        summaries.put(np.arange(40), self.KEYS)
        for head in range(HEADS):
            mean, rest = unpacked(summaries, 9, head)
            exact = self.KEYS[9, head].mean(0)
            centred = self.KEYS[9, head] - exact
            origin = torch.from_numpy(basis.origin[head])
            assert (mean - (exact - origin)).abs().max() <= (exact - origin).abs().max() / 13.9
            assert (rest - centred).square().sum() < 0.1 * centred.square().sum()

    def test_spends_its_coordinates_where_queries_look(self) -> None:
        queries = torch.randn(HEADS, 500, 64, generator=torch.Generator().manual_seed(1))
        queries[:, :, 8:] *= 0.01
        basis = basis_of(self.KEYS, 8, queries)
        summaries = Summaries(40, HEADS, 16, 64, basis=basis)
        summaries.put(np.arange(40), self.KEYS)
        _, rest = unpacked(summaries, 3, 1)
        centred = self.KEYS[3, 1] - self.KEYS[3, 1].mean(0)
        lost = (rest - centred)[:, :8].square().sum() / centred[:, :8].square().sum()
        assert lost < 0.1

    @pytest.mark.parametrize("rank", [2, 16, 24])
    def test_loses_no_more_than_another_of_as_many_coordinates(self, rank: int) -> None:
        draw = torch.Generator().manual_seed(2)
        queries = torch.randn(HEADS, 400, 64, generator=draw) @ torch.randn(64, 64, generator=draw)
        basis = basis_of(self.KEYS, rank, queries)
        centred = self.KEYS - self.KEYS.mean(2, keepdim=True)
        into, back = (torch.from_numpy(one) for one in (basis.into, basis.back))

        def lost(ours: Tensor) -> float:
            return float(torch.einsum("hmd,nhtd->nhmt", queries, ours - centred).square().mean())

        ours = torch.einsum("nhtd,hdr,hre->nhte", centred, into, back)
        for seed in range(3):
            other = torch.linalg.qr(
                torch.randn(64, rank, generator=torch.Generator().manual_seed(seed))
            )[0]
            assert lost(ours) < lost(centred @ other @ other.T)
        flat = centred.transpose(0, 1).flatten(1, 2)
        leading = torch.linalg.svd(flat, full_matrices=False)[2][:, :rank]
        assert lost(ours) < lost(torch.einsum("nhtd,hrd,hre->nhte", centred, leading, leading))

    def test_reaches_to_a_key_far_out_with_wider_steps(self) -> None:
        summaries = Summaries(2, HEADS, 16, 64, basis=basis_of(self.KEYS, 64))
        keys = self.KEYS[:2].clone()
        keys[0, :, 5] *= 30
        summaries.put(np.arange(2), keys)
        assert (summaries.scales[:, 0, 1] > 5).all() and (summaries.scales[:, 1, 1] < 2).all()
        _, rest = unpacked(summaries, 0, 0)
        far = keys[0, 0, 5] - keys[0, 0].mean(0)
        assert (rest[5] - far).norm() < 0.2 * far.norm()

    def test_scores_are_those_of_the_reference(self) -> None:
        draw = torch.Generator().manual_seed(3)
        keys, queries = self.KEYS.clone(), torch.randn(HEADS, 3, 64, generator=draw)
        keys[..., 24:] = 0
        basis = basis_of(keys, 24)
        # One key of each page lies outside the basis: the leading direction of the rest.
        keys[:, :, 7, 24:] = torch.randn(40, HEADS, 40, generator=draw)
        summaries = Summaries(40, HEADS, 16, 64, basis=basis)
        summaries.put(np.arange(40), keys)
        found = score_pages(summaries, np.arange(40), queries.numpy(), 0.125)
        logits = Coordinates(basis).logits(keys.transpose(0, 1), queries * 0.125)
        np.testing.assert_allclose(found, logits.softmax(-1).sum(1), rtol=0.02, atol=1e-3)

    def test_finds_a_key_outside_of_it_by_the_pages_own_direction(self) -> None:
        keys = self.KEYS.clone()
        keys[..., 32:] = 0
        basis = basis_of(keys, 32)
        keys[6, :, 9, 40] = 5.0
        summaries = Summaries(40, HEADS, 16, 64, basis=basis)
        summaries.put(np.arange(40), keys)
        _, rest = unpacked(summaries, 6, 1)
        wanted = keys[6, 1, :, 40] - keys[6, 1, :, 40].mean()
        torch.testing.assert_close(rest[:, 40], wanted, rtol=0, atol=0.5)

    def test_with_own_directions_for_the_rest_loses_nothing(self) -> None:
        queries, keys = torch.randn(HEADS, 3, 64) / 8, self.KEYS.transpose(0, 1)
        whole = Coordinates(basis_of(self.KEYS, 64), bits=None).logits(keys, queries)
        few = Coordinates(basis_of(self.KEYS, 8), bits=None, own=16).logits(keys, queries)
        torch.testing.assert_close(few, whole, rtol=0, atol=1e-3)

    def test_is_that_of_all_that_was_added(self) -> None:
        moments = Moments(HEADS, 64)
        queries = np.random.default_rng(0).standard_normal((HEADS, 300, 64)).astype(np.float32)
        for part in np.split(self.KEYS.numpy(), 4):
            moments.add_pages(part)
        for part in np.split(queries, 3, axis=1):
            moments.add_queries(part)
        whole = basis_of(self.KEYS, 8, torch.from_numpy(queries))
        found = moments.basis(8)
        np.testing.assert_allclose(found.origin, whole.origin, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(
            found.into @ found.back, whole.into @ whole.back, rtol=1e-3, atol=1e-3
        )

    def test_needs_queries_and_keys(self) -> None:
        with pytest.raises(ValueError, match="needs"):
            Moments(HEADS, 64).basis(8)

    def test_of_another_shape_is_refused(self) -> None:
        with pytest.raises(ValueError, match="basis"):
            Summaries(1, HEADS, 16, 128, basis=basis_of(self.KEYS, 8))


def naive(summaries: Summaries, pages: list[int], queries: Tensor, scale: float) -> Tensor:
    """By the formula, in float64."""
    of_heads = zip(summaries.codes[:, pages], summaries.scales[:, pages], queries, strict=True)
    found = [
        stored.logits(summaries.layout, summaries.basis, *kept, head, query * scale)
        for head, (*kept, query) in enumerate(of_heads)
    ]
    return torch.stack(found).softmax(-1).sum(1)


class TestScores:
    @given(
        seed=st.integers(0, 1000),
        shape=SHAPES,
        size=st.sampled_from([0.0, 0.1, 1.0, 5.0]),
    )
    @settings(max_examples=25)
    def test_are_those_of_the_formula(
        self, seed: int, shape: tuple[int, int, int], size: float
    ) -> None:
        tokens, dim, rank = shape
        group = GROUPS[tokens]
        summaries = Summaries(9, HEADS, tokens, dim, rank)
        summaries.put(np.arange(9), keys_of(seed, 9, tokens, dim))
        draw = torch.Generator().manual_seed(seed)
        queries = size * torch.randn(HEADS, group, dim, generator=draw)
        pages = [8, 0, 3, 5, 4, 7]
        found = score_pages(summaries, np.array(pages), queries.numpy(), dim**-0.5)
        wanted = naive(summaries, pages, queries, dim**-0.5)
        torch.testing.assert_close(torch.from_numpy(found).double(), wanted, rtol=2e-4, atol=1e-5)

    @given(
        seed=st.integers(0, 1000),
        shape=st.sampled_from([(16, 64, 24), (32, 64, 24), (16, 128, 20), (6, 24, 12), (8, 32, 4)]),
        size=st.sampled_from([0.0, 0.1, 1.0, 5.0]),
    )
    @settings(max_examples=15)
    def test_in_a_basis_are_those_of_the_formula(
        self, seed: int, shape: tuple[int, int, int], size: float
    ) -> None:
        tokens, dim, rank = shape
        keys = keys_of(seed, 9, tokens, dim)
        summaries = Summaries(9, HEADS, tokens, dim, basis=basis_of(keys, rank))
        summaries.put(np.arange(9), keys)
        draw = torch.Generator().manual_seed(seed)
        queries = size * torch.randn(HEADS, GROUPS[tokens], dim, generator=draw)
        pages = [8, 0, 3, 5, 4, 7]
        found = score_pages(summaries, np.array(pages), queries.numpy(), dim**-0.5)
        wanted = naive(summaries, pages, queries, dim**-0.5)
        torch.testing.assert_close(torch.from_numpy(found).double(), wanted, rtol=3e-4, atol=1e-5)

    def test_are_nearly_those_of_the_reference(self) -> None:
        keys, queries = keys_of(5, 20, 16, 64), torch.randn(HEADS, 3, 64)
        summaries = Summaries(20, HEADS, 16, 64)
        summaries.put(np.arange(20), keys)
        found = score_pages(summaries, np.arange(20), queries.numpy(), 0.125)
        form = Form()
        logits = form.logits(form.summary(keys.transpose(0, 1)), queries * 0.125)
        wanted = logits.softmax(-1).sum(1).numpy()
        assert np.abs(found - wanted).max() < 0.15
        assert np.corrcoef(found.ravel(), wanted.ravel())[0, 1] > 0.98

    def test_of_logits_that_overflow_are_finite_and_those_of_the_best_page(self) -> None:
        keys = keys_of(6, 4, 16, 64)
        keys[2] += 300.0
        summaries = Summaries(4, HEADS, 16, 64)
        summaries.put(np.arange(4), keys)
        found = score_pages(summaries, np.arange(4), np.full((HEADS, 3, 64), 10.0, np.float32), 1.0)
        np.testing.assert_allclose(found, [[0, 0, 3, 0]] * HEADS, atol=1e-5)

    def test_of_no_pages_are_none(self) -> None:
        summaries = Summaries(4, HEADS, 16, 64)
        none = np.empty(0, np.int64)
        assert score_pages(summaries, none, np.zeros((HEADS, 3, 64), np.float32), 1.0).shape == (
            HEADS,
            0,
        )


WAYS = {"vnni": (*VNNI, *AVX2), "avx2": AVX2, "any": ()}


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def dotted(context: Any, way: Any, codes: Any, query: Any, out: Any) -> Any:
    """Of 64 codes and 64 bytes of a query, 16 dot products of four, as such a CPU does it."""
    if not isinstance(way, types.IntegerLiteral):
        return None
    features = list(WAYS.values())[way.literal_value]

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.VectorType(ir.IntType(32), 16)
        places = [
            builder.bitcast(
                context.make_array(signature.args[n])(context, builder, args[n]).data,
                kind.as_pointer(),
            )
            for n in (1, 2, 3)
        ]
        total, *both = (builder.load(place, align=1) for place in (places[2], *places[:2]))
        found = Dot(builder, frozenset(features)).add(total, *both)
        builder.store(found, places[2], align=1)
        return context.get_dummy_value()

    return types.none(way, codes, query, out), generate


@pytest.mark.parametrize("way", WAYS)
def test_dot_products_are_the_same_on_all_cpus(way: str) -> None:
    here, number = get_host_cpu_features(), list(WAYS).index(way)
    if not all(here.get(name) for name in WAYS[way]):
        pytest.skip("this CPU has no such instructions")

    @njit
    def kernel(codes: Any, query: Any, out: Any) -> None:
        dotted(number, codes, query, out)

    draw = np.random.default_rng(0)
    codes = draw.integers(0, 16, 64, np.uint8)
    query = draw.integers(-127, 128, 64, np.int8)
    codes[:4], query[:4] = 15, (-127, 127, 127, 127)
    out = np.arange(16, dtype=np.int32)
    kernel(codes, query, out)
    wanted = (codes.astype(int) * query).reshape(16, 4).sum(1) + np.arange(16)
    assert out.tolist() == wanted.tolist()


class TestTheChoice:
    SCORES = np.array([[0, 5, 1, 4, 2, 3, 9, 9], [9, 1, 1, 1, 1, 1, 0, 0]], np.float32)

    def test_holds_the_first_the_newest_and_the_best_between_them(self) -> None:
        assert select_pages(self.SCORES, 5, 1, 2)[0].tolist() == [0, 1, 3, 6, 7]

    def test_takes_the_earlier_of_equals(self) -> None:
        assert select_pages(self.SCORES, 5, 1, 2)[1].tolist() == [0, 1, 2, 6, 7]

    def test_is_never_less_than_what_is_always_chosen(self) -> None:
        assert select_pages(self.SCORES, 0, 1, 2).tolist() == [[0, 6, 7]] * 2

    def test_is_all_pages_where_these_are_fewer(self) -> None:
        assert select_pages(self.SCORES, 50, 1, 2).tolist() == [list(range(8))] * 2
        assert select_pages(self.SCORES[:, :2], 1, 1, 2).tolist() == [[0, 1]] * 2
        assert select_pages(self.SCORES[:, :0], 1, 1, 2).shape == (2, 0)

    @given(
        scores=st.lists(st.integers(0, 5), min_size=1, max_size=20),
        count=st.integers(0, 25),
        sinks=st.integers(0, 3),
        recent=st.integers(0, 3),
    )
    def test_is_that_of_a_sorted_list(
        self, scores: list[int], count: int, sinks: int, recent: int
    ) -> None:
        n = len(scores)
        always = {i for i in range(n) if i < sinks or i >= n - recent}
        rest = sorted(set(range(n)) - always, key=lambda i: (-scores[i], i))
        wanted = sorted(always | set(rest[: max(0, min(count, n) - len(always))]))
        found = select_pages(np.array([scores], np.float32), count, sinks, recent)
        assert found.tolist() == [wanted]


@pytest.mark.parametrize("value", [np.nan, -np.nan, -np.inf, -1.0, -0.0])
def test_whatever_scores_are_as_many_pages_are_chosen_as_asked_for(value: float) -> None:
    scores = np.full((2, 50), value, np.float32)
    scores[1, 20:30] = 1.0
    chosen = select_pages(scores, 20, 1, 2)
    assert all(len(set(head)) == 20 and 0 <= head[0] <= head[-1] < 50 for head in chosen.tolist())
    assert np.isnan(value) or set(range(20, 30)) <= set(chosen[1].tolist())
