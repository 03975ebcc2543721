"""Decides where each request's KV is made, by predicted seconds. Pure: no Ray, no vLLM, no I/O.

- `plan`, `plan_codec`: plans, and their encoding for a header
- `placement`: the price of each pair of replicas, the search, and the placement policies
- `blocks`: the index of the KV blocks that each replica holds, updated from KV events
- `cluster`: a gateway's state of all replicas, and its plans
- `replica_planner`: a decode replica's own planner
"""

from headrace.router.plan import (
    Geometry,
    Plan,
    PlanRequest,
    PrefillReport,
    RouterSettings,
)
from headrace.router.replica_planner.router import Router

__all__ = [
    "Geometry",
    "Plan",
    "PlanRequest",
    "PrefillReport",
    "Router",
    "RouterSettings",
]
