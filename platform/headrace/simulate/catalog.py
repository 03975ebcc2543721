"""Catalog of placement rules by name.

Other packages add rules by entry points of the group `headrace.simulate.policies`, each a `Policy`.
`headrace_lab` adds the rules of other routers.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import cast

from headrace.router.plan import RouterSettings
from headrace.simulate.ours import Headrace
from headrace.simulate.policies import SIMPLE, Policy

GROUP = "headrace.simulate.policies"
OURS: Mapping[str, RouterSettings] = {
    "headrace": RouterSettings(),
    "headrace-remote": RouterSettings(policy="remote"),
}
"""Headrace's placement, and the same with every prompt computed by a prefill engine."""


def names() -> tuple[str, ...]:
    """Return the names of all rules: Headrace's, the simple ones, and the added ones."""
    return *OURS, *SIMPLE, *_added()


def policy_named(name: str) -> Policy:
    """Return a policy for one run.

    Raises:
        ValueError: there is no policy of this name.
    """
    if name in OURS:
        return Headrace(OURS[name])
    if name in SIMPLE:
        return SIMPLE[name]
    if found := _added().get(name):
        return cast(Policy, found.load())
    raise ValueError(f"no policy is called {name!r}; there are {', '.join(names())}")


def _added() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=GROUP)}
