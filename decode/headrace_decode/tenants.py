"""What an operator allows for whom: whether a tenant is drafted for, and its answers are kept."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

OTHERS = "*"
"""In `Tenants.by_salt`: all that are not named."""


@dataclass(frozen=True)
class TenantPolicy:
    """For one tenant's requests.

    Attributes:
        draft: whether anything is drafted. Without it nothing is kept either.
        keep: whether answers are kept to draft from.
    """

    draft: bool = True
    keep: bool = True


@dataclass(frozen=True)
class Tenants:
    """Policies by cache salt; a tenant's requests without a salt have the salt ""."""

    by_salt: Mapping[str, TenantPolicy] = field(default_factory=dict)

    def of(self, salt: str) -> TenantPolicy:
        """The policy of the tenant with this salt."""
        found = self.by_salt.get(salt) or self.by_salt.get(OTHERS)
        return found or TenantPolicy()


ALL_ALIKE = Tenants()
"""Everybody is drafted for from what everybody keeps for itself."""
