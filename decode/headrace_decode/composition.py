"""Features of an engine that one request can combine, and those that it cannot.

`docs/techniques.md` shows the table.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations

FEATURES = (
    *("resume", "speculation", "grammars", "store"),
    *("blending", "sparse", "offload", "compression"),
)
APART: Mapping[frozenset[str], str] = {
    frozenset({"blending", "sparse"}): "a sparse request blends nothing",
    frozenset({"blending", "compression"}): "a compressed request blends nothing",
    frozenset({"sparse", "compression"}): (
        "a request that asks for both is refused; if the app is configured for both, the one that "
        "the request names is used, else sparse attention"
    ),
    frozenset({"offload", "compression"}): (
        "a compressed request that is too long for the cache streams if there is a predictor, and "
        "is offloaded otherwise"
    ),
    frozenset({"store", "offload"}): "an offloaded request neither loads nor saves blocks",
}
"""Pairs that do not meet in one request, with what happens instead. One engine has them all."""


def composition_table() -> str:
    """Return the pairs of `APART` as a table in Markdown."""
    pairs = (frozenset(pair) for pair in combinations(FEATURES, 2))
    rows = [
        f"| {' and '.join(sorted(pair, key=FEATURES.index))} | {APART[pair]} |"
        for pair in pairs
        if pair in APART
    ]
    return "\n".join(["| not in one request | instead |", "|---|---|", *rows]) + "\n"
