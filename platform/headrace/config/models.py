"""Several models in one configuration: each is the top level, with its own values in `models`.

Pure: works on the plain data of a file, before any field is checked.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

MODEL_SECTIONS = (
    *("model", "prefill", "decode", "autoscaling", "router", "speculation", "techniques"),
)
"""Sections of the top level that each model may have, too. All others are shared by the models."""
MAX_MODELS = 64
MODEL_KEY = r"^[a-z0-9]([a-z0-9-]{0,29}[a-z0-9])?$"
"""A model's name in `models`, which names its deployments."""


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return `base` overridden by `over`. Mappings are merged; other values are replaced."""
    out = dict(base)
    for key, value in over.items():
        old = out.get(key)
        if isinstance(old, Mapping) and isinstance(value, Mapping):
            out[key] = merge(old, value)
        else:
            out[key] = copy.deepcopy(value)
    return out


def with_defaults(data: Any) -> Any:
    """Return a configuration whose `models` have all fields: their own, else the top level's.

    `model.id` and `model.source` are never the top level's: a model without an `id` has its name in
    `models`. Data of a wrong type is returned as it is.
    """
    models = data.get("models") if isinstance(data, Mapping) else None
    if not isinstance(models, Mapping):
        return data
    shared = {name: data[name] for name in MODEL_SECTIONS if name in data}
    if isinstance(shared.get("model"), Mapping):
        own = ("id", "source")
        shared["model"] = {k: v for k, v in shared["model"].items() if k not in own}
    return {**data, "models": {k: _with_defaults(shared, k, v) for k, v in models.items()}}


def _with_defaults(shared: Mapping[str, Any], key: Any, entry: Any) -> Any:
    entry = {} if entry is None else entry
    if not isinstance(entry, Mapping):
        return entry
    named = merge({"model": {"id": str(key)}}, shared)
    return merge(named, entry)
