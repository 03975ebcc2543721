"""The directions in which queries look at keys, learned from a model's own queries and keys.

A page's keys are its mean mu and deviations c. With `rank` coordinates of each c, the logits q.c
err least, over queries and deviations that are independent of each other, for

    coordinates = E^T Cq^1/2 c,   q.c ~ (E^T Cq^-1/2 q).coordinates

where Cq = E[q q^T], Cc = E[c c^T], and E holds the leading eigenvectors of Cq^1/2 Cc Cq^1/2: the
theorem of Eckart and Young (1936) in the metric of the queries. A direction in which keys vary and
no query looks costs nothing. A page's own singular vectors would spend coordinates on it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from headrace_decode.sparse.basis import COORDINATES, Basis

Float = NDArray[np.float32]
SPREAD = 3.0
"""Standard deviations that 4-bit codes cover, unless a key of the page lies farther out."""
UNSEEN_SHARE = 1e-3
"""Share of the mean moment that is added to all directions of queries, for unseen queries."""


class Moments:
    """Second moments of one layer's queries and keys, over all that were added."""

    def __init__(self, kv_heads: int, head_dim: int) -> None:
        shape = kv_heads, head_dim, head_dim
        self._queries, self._deviations = np.zeros(shape), np.zeros(shape)
        self._means = np.zeros(shape[:2])
        self.queries = self.pages = 0

    def add_queries(self, queries: Float) -> None:
        """Count queries, rotated: float32 [kv_heads, m, head_dim]."""
        self._queries += queries.swapaxes(1, 2) @ queries
        self.queries += queries.shape[1]

    def add_pages(self, keys: Float) -> None:
        """Count pages' keys, rotated: float32 [n, kv_heads, page_tokens, head_dim]."""
        means = keys.mean(2, keepdims=True)
        deviations = (keys - means).swapaxes(0, 1).reshape(keys.shape[1], -1, keys.shape[3])
        self._deviations += deviations.swapaxes(1, 2) @ deviations / keys.shape[2]
        self._means += means.sum((0, 2))
        self.pages += len(keys)

    def basis(self, rank: int = COORDINATES) -> Basis:
        """Return the basis of so many coordinates.

        Raises:
            ValueError: no queries or no pages were added.
        """
        if not self.queries or not self.pages:
            raise ValueError("a basis needs queries and keys")
        queries, deviations = self._queries / self.queries, self._deviations / self.pages
        mean = np.trace(queries, axis1=1, axis2=2)[:, None, None] / queries.shape[-1]
        values, vectors = np.linalg.eigh(queries + UNSEEN_SHARE * mean * np.eye(queries.shape[-1]))
        root = (vectors * np.sqrt(values)[:, None]) @ vectors.swapaxes(1, 2)
        inverse = (vectors / np.sqrt(values)[:, None]) @ vectors.swapaxes(1, 2)
        energy, leading = np.linalg.eigh(root @ deviations @ root)
        leading = leading[:, :, : -rank - 1 : -1]
        size = np.sqrt(energy[:, : -rank - 1 : -1].clip(1e-20)) * (SPREAD / 7)
        return Basis(
            (self._means / self.pages).astype(np.float32),
            (root @ leading / size[:, None]).astype(np.float32),
            (size[:, :, None] * (leading.swapaxes(1, 2) @ inverse)).astype(np.float32),
        )
