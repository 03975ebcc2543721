"""The rules that are compared, and the budget and inputs of each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.sparse.attention import Budget, Mass, Score, Share
from headrace_decode.sparse.basis import COORDINATES, Basis
from headrace_decode.sparse.summaries import Summaries
from headrace_lab.sparse.attention import estimated
from headrace_lab.sparse.baselines import BASELINES, EXTRA, ORACLE, Baseline
from headrace_lab.sparse.reference import Coordinates, Form

OURS, OWN, BEST = "ours", "own directions", "oracle"
SHARE = 0.1
PAGE_TOKENS, DIM = 16, 64
SHARES = 0.05, 0.2
TENTH = Share(SHARE)


@dataclass(frozen=True)
class Arm:
    """One rule with a budget.

    Attributes:
        bytes_vs_k: of what it keeps, over those of 16-bit keys, at 64 dimensions.
        main: whether recall is measured, too.
    """

    name: str
    score: Score
    budget: Budget = TENTH
    page_tokens: int = PAGE_TOKENS
    bytes_vs_k: float = float("nan")
    main: bool = False


@dataclass(frozen=True)
class Bases:
    """One basis of each layer, with all coordinates.

    Attributes:
        ours: learned from queries and keys.
        of_keys: from keys alone, as if queries looked everywhere alike.
    """

    ours: Sequence[Basis]
    of_keys: Sequence[Basis]


def first(basis: Basis, rank: int) -> Basis:
    """Its first coordinates."""
    into, back = (
        np.ascontiguousarray(one) for one in (basis.into[..., :rank], basis.back[:, :rank])
    )
    return Basis(basis.origin, into, back)


def kept(bases: Sequence[Basis] | None, rank: int = COORDINATES) -> Score:
    """Summaries as an engine has them, in a basis or by own directions."""
    mine = None if bases is None else [first(basis, rank) for basis in bases]
    return lambda layer: estimated(layer, None if mine is None else mine[layer.number])


def weighed(inner: Score) -> Score:
    """Scores times the root mean square of the page's values."""
    return lambda layer: inner(layer) * layer.values.square().mean((2, 3)).sqrt()[:, None]


def baseline(rule: Baseline) -> Score:
    return lambda layer: layer.combined(
        rule.logits(layer.keys, layer.queries.flatten(1, 2)), rule.softmax
    )


def of_form(form: Form) -> Score:
    return lambda layer: layer.combined(
        form.logits(form.summary(layer.keys), layer.queries.flatten(1, 2))
    )


def of_coordinates(
    bases: Sequence[Basis], make: Callable[[Basis], Coordinates], rank: int = COORDINATES
) -> Score:
    forms = [make(first(basis, rank)) for basis in bases]
    return lambda layer: layer.combined(
        forms[layer.number].logits(layer.keys, layer.queries.flatten(1, 2))
    )


def arms(bases: Bases, ablated: bool) -> Iterator[Arm]:
    """Yield the arms that are measured on a text."""
    ours, own, oracle = kept(bases.ours), kept(None), baseline(ORACLE)
    mean = baseline(BASELINES["mean"])
    basis = first(bases.ours[0], COORDINATES)
    sizes = (
        Summaries(1, basis.into.shape[0], PAGE_TOKENS, basis.into.shape[1], basis=one).layout
        for one in (basis, None)
    )
    ours_bytes, own_bytes = (one.bytes_vs_k for one in sizes)
    yield Arm(OURS, ours, bytes_vs_k=ours_bytes, main=True)
    yield Arm(OWN, own, bytes_vs_k=own_bytes, main=True)
    yield Arm(BEST, oracle, bytes_vs_k=1.0, main=True)
    for name, one in (BASELINES | EXTRA).items():
        yield Arm(name, baseline(one), bytes_vs_k=one.bytes_vs_k, main=True)
    if not ablated:
        return
    for other in SHARES:
        for name, score_ in ((OURS, ours), (OWN, own), (BEST, oracle), ("mean", mean)):
            yield Arm(f"{name}, {other:.0%}", score_, Share(other))
    for name, score_ in ((OURS, ours), (OWN, own), (BEST, oracle), ("mean", mean)):
        yield Arm(f"{name}, pages of 32", score_, page_tokens=32)
    for name, budget in BUDGETS.items():
        yield Arm(f"{OURS}, {name}", ours, budget)
    yield Arm(f"{OURS}, times values", weighed(ours))
    whole = 2 * PAGE_TOKENS * DIM
    for rank in (16, 24):
        size = Coordinates(first(bases.ours[0], rank)).nbytes(PAGE_TOKENS, DIM) / whole
        name = f"{OURS}, {rank} coordinates"
        yield Arm(name, kept(bases.ours, rank), bytes_vs_k=size, main=True)
    for rank in (20, 24):
        size = Coordinates(first(bases.ours[0], rank), own=0).nbytes(PAGE_TOKENS, DIM) / whole
        score_ = of_coordinates(bases.ours, lambda basis: Coordinates(basis, own=0), rank)
        name = f"{OURS}, {rank} coordinates alone"
        yield Arm(name, score_, bytes_vs_k=size, main=True)
    for name, make in SHARED.items():
        size = make(basis).nbytes(PAGE_TOKENS, DIM) / whole
        score_ = of_coordinates(bases.ours, make)
        yield Arm(f"{OURS}, {name}", score_, bytes_vs_k=size, main=True)
    of_keys = kept(bases.of_keys)
    yield Arm(f"{OURS}, basis of keys alone", of_keys, bytes_vs_k=ours_bytes, main=True)
    for name, form in FORMS.items():
        yield Arm(f"{OWN}, {name}", of_form(form), bytes_vs_k=form.nbytes(PAGE_TOKENS, DIM) / whole)


SHARED: dict[str, Callable[[Basis], Coordinates]] = {
    "8 bits": lambda basis: Coordinates(basis, 8),
    "fp32": lambda basis: Coordinates(basis, None),
    "max": lambda basis: Coordinates(basis, largest=True),
}
FORMS = {
    "rank 1": Form(rank=1),
    "rank 2": Form(rank=2),
    "rank 6": Form(rank=6),
    "8 bits": Form(bits=8),
    "fp32": Form(bits=None),
    "max": Form(largest=True),
    "rank 3, 1 key kept by distance": Form(rank=3, kept=1),
    "rank 3, 1 key kept by norm": Form(rank=3, kept=1, by_norm=True),
}
BUDGETS = {
    "mass 0.9": Mass(0.9),
    "mass 0.95, 5 to 20 %": Mass(0.95, 0.05, 0.2),
}
