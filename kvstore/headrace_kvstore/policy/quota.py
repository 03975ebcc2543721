"""Quotas of tenants: whoever holds more bytes than allowed gives up the excess first.

Only when room is short: a tenant may use what nobody else needs. Within a tenant, and once nobody
is above, the wrapped policy chooses.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from headrace_kvstore.policy.base import Keys, Policy, Slots, Table
from headrace_kvstore.table import FREE


class TenantQuotas(Policy):
    """`policy` under quotas.

    Parameters
    ----------
    policy
        Chooses among the slots that it is shown.
    quota_bytes
        Bytes that each tenant (the table's field) may hold when room is short.
    default_bytes
        For tenants that are not listed; None for no limit.
    """

    def __init__(
        self, policy: Policy, quota_bytes: Mapping[int, float], default_bytes: float | None = None
    ) -> None:
        self._policy, self._quota_bytes, self._default_bytes = policy, quota_bytes, default_bytes
        self.name = policy.name

    def prompt(self, keys: Keys, now_s: float) -> int:
        return self._policy.prompt(keys, now_s)

    def admit(
        self,
        ticket: int,
        compute_s: NDArray[np.float64],
        load_s: NDArray[np.float64],
        nbytes: NDArray[np.float64],
    ) -> int:
        return self._policy.admit(ticket, compute_s, load_s, nbytes)

    def touched(self, table: Table, slots: Slots, ticket: int, now_s: float, hit: bool) -> None:
        self._policy.touched(table, slots, ticket, now_s, hit)

    def choose(self, table: Table, now_s: float, need: int) -> Slots:
        shown = table.copy()
        chosen: list[Slots] = []
        for tenant, excess_bytes in self._above(table):
            if need <= 0:
                break
            shown["pinned"] = np.where(table["tenant"] == tenant, table["pinned"], 1)
            worst = self._policy.choose(shown, now_s, need)
            freed_bytes = np.cumsum(table["bytes"][worst])
            enough = int(np.searchsorted(freed_bytes, excess_bytes)) + 1
            chosen.append(worst[:enough])
            need -= len(chosen[-1])
        if need > 0:
            shown["pinned"] = table["pinned"]
            for taken in chosen:
                shown[taken] = np.zeros((), table.dtype)
            chosen.append(self._policy.choose(shown, now_s, need))
        return np.concatenate(chosen) if chosen else np.zeros(0, np.int64)

    def _above(self, table: Table) -> list[tuple[int, float]]:
        """Tenants above their quota and by how many bytes, most first."""
        used = table["state"] != FREE
        tenants, which = np.unique(table["tenant"][used], return_inverse=True)
        held = np.bincount(which.reshape(-1), table["bytes"][used], len(tenants))
        above = []
        for tenant, held_bytes in zip(tenants.tolist(), held.tolist(), strict=True):
            quota = self._quota_bytes.get(tenant, self._default_bytes)
            if quota is not None and held_bytes > quota:
                above.append((tenant, held_bytes - quota))
        return sorted(above, key=lambda pair: -pair[1])
