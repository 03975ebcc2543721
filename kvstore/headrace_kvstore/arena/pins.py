"""Chains of pinned blocks: a pinned prompt is a chain from its root block to a leaf.
Pure.

Rows are SLOT (n,), of pinned blocks of one arena. A block's parent is known by the first 8 bytes of
its hash, within the same namespace.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

MAX_PINNED_SHARE = 0.5
"""Share of the arena that pins may take: the rest always has room for what engines save."""

MAX_RETAINED_SHARE = 0.25
"""Share of the arena that retained blocks may take. Beside the pins, a quarter always remains for
the blocks of requests that retain nothing, which are evicted as the policy ranks them."""
MAX_TENANT_SHARE = 0.5
"""Share of the room for retained blocks that one tenant's may take, and share of its quota: no
tenant takes all of the room, and a tenant always has blocks to evict for its next ones."""

Key = tuple[int, int]
"""Namespace id, first 8 bytes of a block hash."""


def _index(rows: np.ndarray) -> tuple[dict[Key, int], list[Key]]:
    """Return positions by key, and the key of each block's parent."""
    namespaces = rows["namespace"].tolist()
    words = np.array(rows["hash"]).view(np.uint64).reshape(-1, 4)[:, 0].tolist()
    parents = list(zip(namespaces, rows["parent"].tolist(), strict=True))
    return {key: i for i, key in enumerate(zip(namespaces, words, strict=True))}, parents


def leaves(rows: np.ndarray) -> list[int]:
    """Return the positions of blocks that no other pinned block follows."""
    places, parents = _index(rows)
    inner = set(parents)
    return [i for key, i in places.items() if key not in inner]


def chain(rows: np.ndarray, leaf: int) -> set[int]:
    """Return the positions of a leaf and the pinned blocks before it that no other leaf needs."""
    places, parents = _index(rows)
    needed: set[int] = set()
    for other in leaves(rows):
        if other != leaf:
            needed.update(_up(places, parents, other, needed))
    return set(_up(places, parents, leaf, needed))


def _up(places: dict[Key, int], parents: list[Key], at: int, until: set[int]) -> Iterator[int]:
    """Yield the chain from a block to its root, or to one of `until`."""
    seen: set[int] = set()
    here: int | None = at
    while here is not None and here not in until and here not in seen:
        seen.add(here)
        here = places.get(parents[here])
    yield from seen
