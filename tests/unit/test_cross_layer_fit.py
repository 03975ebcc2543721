"""Closed-form fits of one layer's KV to others': what they find, and that it is the least error."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from headrace_lab.cross_layer.fit import Sums, fit_keys, fit_values
from headrace_lab.models.decoder import KV

TEXTS, TOKENS, HEADS, DIM = 2, 40, 2, 8


def noise(seed: int) -> Tensor:
    return torch.randn(TEXTS, TOKENS, HEADS, DIM, generator=torch.Generator().manual_seed(seed))


def turned(keys: Tensor, phase: Tensor) -> Tensor:
    a, b = keys.chunk(2, -1)
    cos, sin = phase.cos(), phase.sin()
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def sums(keys: list[Tensor], values: list[Tensor]) -> Sums:
    return Sums.of(KV(enumerate(zip(keys, values, strict=True))))


LOW, HIGH = noise(1), noise(2)


def weights(seed: int, *shape: int) -> Tensor:
    return 0.5 + torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


class TestKeys:
    def test_a_turned_mixture_is_found(self) -> None:
        a, b = weights(3, HEADS, DIM // 2), weights(4, HEADS, DIM // 2)
        phase = 1.5 * weights(5, HEADS, DIM // 2) - 1.0
        mixed = torch.cat([a, a], -1) * LOW + torch.cat([b, b], -1) * HIGH
        found = fit_keys(sums([LOW, HIGH, turned(mixed, phase)], [LOW] * 3), 2, [0, 1])
        sign = torch.where((found.phase - phase).cos() > 0, 1.0, -1.0)
        assert found.error < 1e-3
        torch.testing.assert_close(found.weights[0] * sign, a, atol=1e-2, rtol=0)
        torch.testing.assert_close(found.weights[1] * sign, b, atol=1e-2, rtol=0)
        torch.testing.assert_close(
            (found.phase - phase).sin().abs().max(), torch.tensor(0.0), atol=1e-2, rtol=0
        )

    def test_no_other_phase_or_weight_is_better(self) -> None:
        wanted = noise(6) + 0.5 * LOW - 0.2 * turned(HIGH, torch.tensor(1.0))
        made = sums([LOW, HIGH, wanted], [LOW] * 3)
        found = fit_keys(made, 2, [0, 1])

        def error(weights: Tensor, phase: Tensor) -> float:
            a, b = (torch.cat([one, one], -1) for one in weights)
            apart = wanted - turned(a * LOW + b * HIGH, phase)
            return float(apart.square().sum() / wanted.square().sum())

        least = error(found.weights, found.phase)
        assert least == pytest.approx(found.error, abs=1e-4)
        for step in (-0.1, 0.1):
            assert error(found.weights, found.phase + step) > least
            for source in range(2):
                other = found.weights.clone()
                other[source] += step
                assert error(other, found.phase) > least

    def test_a_second_source_never_hurts(self) -> None:
        made = sums([LOW, HIGH, noise(7)], [LOW] * 3)
        both = fit_keys(made, 2, [0, 1]).error
        assert both <= min(fit_keys(made, 2, [n]).error for n in (0, 1)) + 1e-6


class TestValues:
    def test_a_linear_map_of_one_source_is_found(self) -> None:
        linear = torch.randn(HEADS, DIM, DIM, generator=torch.Generator().manual_seed(8))
        values = torch.einsum("hab,tnhb->tnha", linear, LOW)
        made = sums([LOW] * 3, [LOW, HIGH, values])
        assert fit_values(made, 2, [0]).error < 1e-3
        assert fit_values(made, 2, [1]).error > 0.5

    def test_a_linear_map_of_a_mixture_is_better_found_with_both_sources(self) -> None:
        linear = torch.randn(HEADS, DIM, DIM, generator=torch.Generator().manual_seed(9))
        a, b = weights(10, HEADS, DIM), weights(11, HEADS, DIM)
        values = torch.einsum("hab,tnhb->tnha", linear, a * LOW + b * HIGH)
        made = sums([LOW] * 3, [LOW, HIGH, values])
        both = fit_values(made, 2, [0, 1]).error
        assert both < 0.5 * min(fit_values(made, 2, [n]).error for n in (0, 1))

    def test_errors_are_shares_of_the_energy(self) -> None:
        made = sums([LOW] * 3, [LOW, HIGH, noise(12)])
        for sources in ([0], [1], [0, 1]):
            assert 0 <= fit_values(made, 2, sources).error <= 1
        assert math.isclose(fit_values(made, 0, [0]).error, 0, abs_tol=1e-3)
