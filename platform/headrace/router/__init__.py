"""Where each request's KV is made, by predicted seconds. Pure: no Ray, no vLLM, no I/O."""

from headrace.router.plan import (
    Geometry,
    Plan,
    PlanRequest,
    PrefillReport,
    RouterSettings,
)
from headrace.router.router import Router

__all__ = [
    "Geometry",
    "Plan",
    "PlanRequest",
    "PrefillReport",
    "Router",
    "RouterSettings",
]
