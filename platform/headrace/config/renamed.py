"""Configuration fields that have been renamed or removed, for the error about an old one."""

from __future__ import annotations

from typing import Any

RENAMED = {
    "elasticity": "autoscaling",
    "elasticity.share": "autoscaling.slo_attainment",
    "autoscaling.share": "autoscaling.slo_attainment",
    "techniques.reuse": "techniques.blending",
    "techniques.reuse.budget": "techniques.blending.recompute_ratio",
    "techniques.blending.budget": "techniques.blending.recompute_ratio",
    "techniques.bounded": "techniques.compression",
    "techniques.bounded.share": "techniques.compression.keep_ratio",
    "techniques.compression.share": "techniques.compression.keep_ratio",
    "techniques.bounded.stream": "techniques.compression.incremental",
    "techniques.compression.stream": "techniques.compression.incremental",
    "techniques.sparse.share": "techniques.sparse.keep_ratio",
    "techniques.sparse.unit_tokens": "techniques.sparse.page_tokens",
}
"""New paths of fields that have been renamed."""
REMOVED = {
    "router.remeasure_s": "it has been removed: an engine that has computed no prompt for 60 s is "
    "tried once; remove the field",
    "speculation.save": "it has been removed: new replicas read what running ones share; after a "
    "restart of all of them, load corpora with `headrace corpus load`",
    "token_path": "it has been removed: requests always pass through the gateway (`relay`); remove "
    "the field",
}
"""Instructions for fields that have been removed."""


def renamed(path: str, value: Any) -> str:
    """Return what became of an old field: the new names of it and of the old fields in its value,
    or what to do without it.

    Returns:
        Text for an error message; empty if the field never existed.
    """
    if path not in RENAMED:
        return REMOVED.get(path, "")
    inner = value if isinstance(value, dict) else {}
    fields = [name for name in inner if f"{path}.{name}" in RENAMED]
    return "; ".join(
        [f"it is called {RENAMED[path]} now"]
        + [f"{name} in it is {RENAMED[f'{path}.{name}'].rpartition('.')[2]}" for name in fields]
    )
