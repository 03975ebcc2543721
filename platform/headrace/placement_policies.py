"""Names of Headrace's placement policies, and the rule by which each chooses replicas.

`headrace.router.placement.policies` has their classes. The configuration, the command line and the
documentation take names and rules from here: this module imports nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

COST, ROUND_ROBIN = "cost", "round-robin"
LOAD, PREFIX_AFFINITY = "least-loaded", "prefix-affinity"

RULES: Mapping[str, str] = {
    COST: "the fewest predicted seconds, added over all requests",
    ROUND_ROBIN: "the replicas of each role in turn",
    LOAD: "the replicas with the fewest requests",
    PREFIX_AFFINITY: "the longest cached prefix among replicas whose load is at most 1.25 times "
    "the mean (plus one request)",
}
"""Rules by name. The first is the default."""
