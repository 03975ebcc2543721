"""How much each tenant may hold in DRAM: the settings `quotas` and `default_quota`.

A tenant is what the API key proves, or, where no keys are configured, the cache salt that the
client sends. Requests without either belong to no tenant and have no quota.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from headrace_kvstore.table import tenant_number


@dataclass(frozen=True, slots=True)
class Quotas:
    """Bytes by tenant; `default_bytes` for tenants that are not listed, None for no limit."""

    by_salt: Mapping[str, int] = field(default_factory=dict)
    default_bytes: int | None = None

    @property
    def options(self) -> dict[str, Any]:
        """As the arena takes them."""
        return {
            "quotas": {tenant_number(salt): size for salt, size in self.by_salt.items()},
            "default_quota": self.default_bytes,
        }
