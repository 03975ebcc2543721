"""Settings that an administrator changes at run time, kept for replicas that start later.

The cluster keeps the overrides in force. A gateway stores an override before it tells the replicas.
Each replica reads the store when it starts and every few seconds, so a replica that starts just
then, or was not reached, applies the override, too. Overrides end when the app is deleted.

    policy        where prompts are prefilled
    mode          how replicas draft
    draft_cap     maximum number of draft tokens a step
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from headrace_engine.serving.model_values import ModelValues

FIELDS = ("policy", "mode", "draft_cap")


class OverrideStore(ModelValues):
    """Store of a model's overrides."""

    __slots__ = ()

    def set_override(self, override: Mapping[str, Any]) -> None:
        """Store an override: values of any of `FIELDS`."""
        for name in FIELDS:
            if name in override:
                self.write(self.key(name), msgspec.json.encode(override[name]))

    def all(self) -> dict[str, Any]:
        """Return the stored value of each field that has one. Values that are no JSON are left
        out."""
        found = {}
        for name in FIELDS:
            try:
                found[name] = msgspec.json.decode(self.read(self.key(name)) or b"")
            except msgspec.DecodeError:
                continue
        return found


@dataclass(slots=True)
class AppliedOverrides:
    """Overrides that a replica has applied, to find those that it still has to apply."""

    _applied: dict[str, Any] = field(default_factory=dict)

    def pending(self, stored: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the overrides to apply, one field each."""
        changed = {
            name: value
            for name, value in stored.items()
            if name not in self._applied or self._applied[name] != value
        }
        self._applied |= changed
        return [{name: value} for name, value in changed.items()]
