"""Which windows of tokens several tenants' answers have in common.

k-anonymity (Sweeney 2002) for n-grams: a window that the answers of at least k tenants contain may
be drafted for everybody, since it identifies none of them; nothing longer may, as two windows
that overlap can come from different tenants. What is published is the k-th tenant's own copy.

Windows begin at places chosen by their first two tokens, one in four, so that all tenants' copies
of a text are cut alike wherever they stand (Schleimer, Wilkerson and Aiken, Winnowing, SIGMOD
2003, choose places by content, too).
Of a window and of a tenant only a keyed digest is kept. When there are too many, those that nobody
has used for the longest time are forgotten: that can only count too few tenants.
"""

from __future__ import annotations

import hashlib
import secrets
from collections import OrderedDict

import numpy as np
from numpy.typing import NDArray

from headrace_kvstore.salts import tenant_of

WINDOW_TOKENS = 15
"""With a separator behind it, two granules of the ring."""
ONE_IN = 4
ENTRIES = 65536
_FACTORS = np.array([0x9E3779B1, 0x85EBCA77], np.uint32)

Window = NDArray[np.int32]


class SharedWindows:
    """Counts tenants by window.

    Takes about 200 + 50 (k - 1) bytes an entry.
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
        k: tenants that must have a window, 2 or more.
        window_tokens: length of windows, 2 or more.
        one_in: about so many places have one window that begins there.
        entries: most windows that are counted at a time.
        """
        if k < 2 or window_tokens < 2:
            raise ValueError(f"windows of {window_tokens} tokens of {k} tenants: both must be >= 2")
        self._k, self._tokens, self._one_in, self._most = k, window_tokens, one_in, entries
        self._key = secrets.token_bytes(32)
        self._seen: OrderedDict[bytes, tuple[bytes, ...] | None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._seen)

    def observe(self, tenant: str, answer: NDArray[np.int32]) -> list[Window]:
        """The windows of this answer for which this tenant is the k-th; each is returned once.

        Args:
            tenant: a cache salt. Salts that name the same tenant count once, so that nobody poses
                as k tenants by sending k salts.
            answer: int32 [n], what one request of the tenant was answered.
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
    """Where windows begin, ascending; the same wherever in a text a window stands."""
    places = len(tokens) - window_tokens + 1
    if places <= 0:
        return np.empty(0, np.intp)
    first = tokens[: places + 1].astype(np.uint32)
    mixed = first[:places] * _FACTORS[0] ^ first[1 : places + 1] * _FACTORS[1]
    return np.flatnonzero((mixed >> np.uint32(16)) % np.uint32(one_in) == 0)
