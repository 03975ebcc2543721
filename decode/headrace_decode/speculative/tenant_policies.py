"""An operator's drafting policy for each tenant: whether to draft, and whether to keep answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

OTHERS = "*"
"""Key in `Tenants.by_salt` for all tenants without an entry."""


@dataclass(frozen=True)
class TenantPolicy:
    """The drafting policy for one tenant's requests.

    Attributes:
        draft: whether tokens are drafted. If not, no answers are kept either.
        keep: whether answers are kept to draft from.
    """

    draft: bool = True
    keep: bool = True


@dataclass(frozen=True)
class Tenants:
    """The drafting policies by cache salt; requests without a salt have the salt ""."""

    by_salt: Mapping[str, TenantPolicy] = field(default_factory=dict)

    def of(self, salt: str) -> TenantPolicy:
        """Return the policy of the tenant with this salt."""
        found = self.by_salt.get(salt) or self.by_salt.get(OTHERS)
        return found or TenantPolicy()


ALL_ALIKE = Tenants()
"""Policies that draft for every tenant, and keep every tenant's answers."""
