"""The placement rules by name."""

from __future__ import annotations

from collections.abc import Mapping

from headrace.router.plan import RouterSettings
from headrace.simulate.ours import Headrace
from headrace.simulate.policies import PEERS, Policy

OURS: Mapping[str, RouterSettings] = {
    "headrace": RouterSettings(),
    "headrace-remote": RouterSettings(policy="remote"),
}
"""Our placement, and the same with every prompt computed by a prefill engine."""

NAMES = (*OURS, *PEERS)


def policy_named(name: str) -> Policy:
    """A policy for one run.

    Raises:
        ValueError: there is none of this name.
    """
    if name in OURS:
        return Headrace(OURS[name])
    if name not in PEERS:
        raise ValueError(f"no policy is called {name!r}; there are {', '.join(NAMES)}")
    return PEERS[name]
