"""How far a request's drafts are believed: whether lately they kept what they promised.

A memory calibrates its survivals over many requests and hours. A request of another kind, or a
change of the whole workload, would have them all wrong until that has been relearned, and every
step until then would verify tokens that are refused. Here the promise is compared with what came,
request by request, and believed less, or somewhat more, at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace_decode.speculation.draft import chances_of

_OWN_TOKENS = 16.0
_ALL_TOKENS = 64.0
_DOUBT_OWN, _DOUBT_ALL = 3.0, 4.0
MOST = 1.25
"""Drafts are believed at most so many times what they promise of a token."""
SUREST = 0.995
"""Of a token, unless more was promised."""


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
    """``rho`` of a request: what came true over what its drafts promised, at most `MOST`.

    With ``h_i = s_i / s_(i-1)`` the promised chance of token i behind right ones, and over the
    tokens that were tested ``P`` the sum of h and ``R`` the number that were right:

        rho_all = min(1, (R + 4) / (P + 4))               memory: 64 promised tokens
        rho     = min(MOST, (R_own + 3 rho_all) / (P_own + 3))        memory: 16, this request's

    Every h is multiplied by it, but not beyond `SUREST`. A request that keeps more than was
    promised is drafted for further: where tokens are cheap, most is lost by stopping early. One
    that is not known yet is believed no more than it promises.
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
                min(MOST, (own.right + _DOUBT_OWN * overall) / (own.promised + _DOUBT_OWN))
                for own in requests
            ),
            np.float32,
            len(requests),
        )
        chances = chances_of(survival)
        sure = np.maximum(chances, np.float32(SUREST))
        believed = np.minimum(chances * rho[:, None], sure)
        return np.asarray(np.cumprod(believed, axis=1), np.float32)
