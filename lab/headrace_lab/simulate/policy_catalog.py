"""Catalog of placement rules by name.

Other packages add rules by entry points of the group `headrace.simulate.policies`, each a `Policy`.
`headrace_lab` adds the rules of other routers.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import cast

from headrace.config.checks.messages import did_you_mean
from headrace.placement_policies import COST
from headrace.router.placement.policies import policy_names as placement_policies
from headrace.router.plan import RouterSettings
from headrace_lab.simulate.headrace_policy import HeadracePolicy
from headrace_lab.simulate.policies import BUILTIN_POLICIES, Policy

GROUP = "headrace.simulate.policies"
HEADRACE_POLICIES: Mapping[str, RouterSettings] = {
    "headrace": RouterSettings(),
    "headrace-remote": RouterSettings(policy="remote"),
    **{name: RouterSettings(placement=name) for name in placement_policies() if name != COST},
}
"""The gateway's placement by policy, and the policy `cost` with all prompts computed remotely."""


def names() -> tuple[str, ...]:
    """Return the names of all rules: Headrace's, the simple ones, and the added ones."""
    return *HEADRACE_POLICIES, *BUILTIN_POLICIES, *_added()


def find_policy(name: str) -> Policy:
    """Return a policy for one run.

    Raises:
        ValueError: there is no policy of this name.
    """
    if name in HEADRACE_POLICIES:
        return HeadracePolicy(HEADRACE_POLICIES[name])
    if name in BUILTIN_POLICIES:
        return BUILTIN_POLICIES[name]
    if found := _added().get(name):
        return cast(Policy, found.load())
    hint = did_you_mean(name, list(names())) or f"; there are {', '.join(names())}"
    raise ValueError(f'no policy is called "{name}"{hint}')


def _added() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=GROUP)}
