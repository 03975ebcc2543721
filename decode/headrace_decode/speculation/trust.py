"""How far a request's drafts are believed: whether lately they kept what they promised.

A memory calibrates its survivals over many requests and hours. A request of another kind, or a
change of the whole workload, would have them all wrong until that has been relearned, and every
step until then would verify tokens that are refused. Here the promise is compared with what came,
request by request, and believed the less at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_OWN_TOKENS = 16.0
_ALL_TOKENS = 64.0
_DOUBT_OWN, _DOUBT_ALL = 3.0, 4.0


@dataclass
class Kept:
    """Of tokens put to the test: how many were promised to be right, and how many were. Both forget
    at `1 / memory` a promised token."""

    promised: float = 0.0
    right: float = 0.0

    def learn(self, promised: float, right: float, memory: float) -> None:
        keep = max(1.0 - promised / memory, 0.0)
        self.promised = keep * self.promised + promised
        self.right = keep * self.right + right


class Trust:
    """``rho`` of a request: the share of what its drafts promised that came true, at most 1.

    With ``h_i = s_i / s_(i-1)`` the promised chance of token i behind right ones, and over the
    tokens that were tested ``P`` the sum of h and ``R`` the number that were right:

        rho_all = min(1, (R + 4) / (P + 4))               memory: 64 promised tokens
        rho     = min(1, (R_own + 3 rho_all) / (P_own + 3))        memory: 16, this request's

    Every h is multiplied by it, so survival i (from 0) by ``rho ** (i + 1)``. It only lowers: what
    promises too little is the memory's to learn.
    """

    def __init__(self) -> None:
        self._all = Kept()

    @property
    def overall(self) -> float:
        """Of a request that is not known yet."""
        return min(1.0, (self._all.right + _DOUBT_ALL) / (self._all.promised + _DOUBT_ALL))

    def learn(self, own: Kept, promised: float, right: float) -> None:
        """A draft of a request was tested."""
        own.learn(promised, right, _OWN_TOKENS)
        self._all.learn(promised, right, _ALL_TOKENS)

    def believed(self, survival: NDArray[np.float32], requests: list[Kept]) -> NDArray[np.float32]:
        """Survivals [n, K] of drafts of these n requests, as far as they are believed."""
        overall = self.overall
        rho = np.fromiter(
            (
                min(1.0, (own.right + _DOUBT_OWN * overall) / (own.promised + _DOUBT_OWN))
                for own in requests
            ),
            np.float32,
            len(requests),
        )
        places = np.arange(1, survival.shape[1] + 1, dtype=np.float32)
        return survival * rho[:, None] ** places
