"""Finds windows of tokens that the answers of several tenants have in common.

This is k-anonymity (Sweeney 2002) for n-grams. A window that the answers of at least k tenants
contain may be drafted for all tenants, since it identifies none of them. A longer text may not,
since two overlapping windows can come from different tenants. The published window is the k-th
tenant's own copy.

Windows begin at places chosen by their first two tokens, one in four, so that all tenants' copies
of a text are cut in the same way wherever they stand (Schleimer, Wilkerson and Aiken, Winnowing,
SIGMOD 2003, choose places by content, too). Only keyed digests of windows and tenants are kept.
When there are too many, the least recently used windows are removed; then fewer tenants may be
counted, but never more.
"""

from __future__ import annotations

import hashlib
import secrets
from collections import OrderedDict

import numpy as np
from numpy.typing import NDArray

from headrace_kvstore.salts import tenant_of

WINDOW_TOKENS = 15
"""Length of a window; with a separator after it, it takes two granules of the ring."""
ONE_IN = 4
ENTRIES = 65536
_FACTORS = np.array([0x9E3779B1, 0x85EBCA77], np.uint32)

Window = NDArray[np.int32]


class SharedWindows:
    """The tenants of each window.

    An entry takes about 200 + 50 (k - 1) bytes.
    """

    def __init__(
        self,
        k: int,
        *,
        window_tokens: int = WINDOW_TOKENS,
        one_in: int = ONE_IN,
        entries: int = ENTRIES,
    ) -> None:
        """Args:
        k: number of tenants that must have a window, 2 or more.
        window_tokens: length of windows, 2 or more.
        one_in: about one place in so many is the begin of a window.
        entries: maximum number of windows that are counted at the same time.
        """
        if k < 2 or window_tokens < 2:
            raise ValueError(f"windows of {window_tokens} tokens of {k} tenants: both must be >= 2")
        self._k, self._tokens, self._one_in, self._most = k, window_tokens, one_in, entries
        self._key = secrets.token_bytes(32)
        self._seen: OrderedDict[bytes, tuple[bytes, ...] | None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._seen)

    def observe(self, tenant: str, answer: NDArray[np.int32]) -> list[Window]:
        """Return the windows of this answer for which this tenant is the k-th, each only once.

        Args:
            tenant: a cache salt. Salts that name the same tenant count once, so that no tenant can
                pose as k tenants by sending k salts.
            answer: int32 [n], the answer to one request of the tenant.
        """
        who, found = self._digest(tenant_of(tenant).encode()), []
        for start in picked(answer, self._tokens, self._one_in).tolist():
            window = answer[start : start + self._tokens]
            name = self._digest(window.astype("<i4").tobytes())
            tenants = self._seen.pop(name, ())
            if tenants is not None and who not in tenants:
                tenants = (*tenants, who)
                if len(tenants) == self._k:
                    found.append(window.copy())
                    tenants = None
            self._seen[name] = tenants
            if len(self._seen) > self._most:
                self._seen.popitem(last=False)
        return found

    def _digest(self, data: bytes) -> bytes:
        return hashlib.blake2b(data, digest_size=16, key=self._key).digest()


def picked(tokens: NDArray[np.int32], window_tokens: int, one_in: int) -> NDArray[np.intp]:
    """Return the positions at which windows begin, ascending.

    Whether a window begins depends only on its tokens, and not on its place in a text.
    """
    places = len(tokens) - window_tokens + 1
    if places <= 0:
        return np.empty(0, np.intp)
    first = tokens[: places + 1].astype(np.uint32)
    mixed = first[:places] * _FACTORS[0] ^ first[1 : places + 1] * _FACTORS[1]
    return np.flatnonzero((mixed >> np.uint32(16)) % np.uint32(one_in) == 0)
