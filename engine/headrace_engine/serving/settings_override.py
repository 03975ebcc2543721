"""Settings that an administrator changes at run time, kept for replicas that start later.

The cluster keeps the overrides in force. A gateway stores an override before it tells the replicas.
Each replica reads the store when it starts and every few seconds, so a replica that starts just
then, or was not reached, applies the override, too. Overrides end when the app is deleted.

    policy        where prompts are prefilled
    mode          how replicas draft
    draft_cap     maximum number of draft tokens a step

An override is either permanent (`standing`), or temporary (`passing`): it holds until a time, and
then the permanent one holds again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec

from headrace_engine.serving.model_values import ModelValues

FIELDS = ("policy", "mode", "draft_cap")

Value = Annotated[tuple[Any, ...], msgspec.Meta(max_length=1)]


class Override(msgspec.Struct, frozen=True):
    """One field's overrides, as the cluster keeps them. Times are Unix seconds.

    Attributes:
        standing: the permanent value in a tuple; empty if none was ever set.
        passing: likewise, of the value that holds until `until_s`.
    """

    standing: Value = ()
    passing: Value = ()
    until_s: float = 0.0

    def with_override(self, value: Any, now_s: float, for_s: float | None) -> Override:
        """Return the overrides after a new one. A permanent one ends a temporary one."""
        if for_s is None:
            return Override((value,))
        return Override(self.standing, (value,), now_s + for_s)

    @classmethod
    def of(cls, value: bytes | None) -> Override:
        """Read overrides from JSON. None if there is no value, or not one of ours."""
        try:
            return msgspec.json.decode(value or b"{}", type=cls)
        except msgspec.DecodeError:
            return cls()


class OverrideStore(ModelValues):
    """Store of a model's overrides."""

    __slots__ = ()

    def set_override(self, override: Mapping[str, Any], now_s: float) -> None:
        """Store an override: any of `FIELDS`, and `for_s` if it holds for so many seconds only."""
        for name in FIELDS:
            if name in override:
                key = self.key(name)
                stored = Override.of(self.read(key))
                stored = stored.with_override(override[name], now_s, override.get("for_s"))
                self.write(key, msgspec.json.encode(stored))

    def all(self) -> dict[str, Override]:
        """Return the overrides that are stored for each field."""
        return {name: Override.of(self.read(self.key(name))) for name in FIELDS}


@dataclass(slots=True)
class AppliedOverrides:
    """Overrides that a replica has applied, to find those that it still has to apply."""

    _applied: dict[str, Override] = field(default_factory=dict)

    def pending(self, stored: Mapping[str, Override], now_s: float) -> list[dict[str, Any]]:
        """Return the overrides to apply, in sequence, as `set_override` took them."""
        overrides: list[dict[str, Any]] = []
        for name, kept in stored.items():
            before = self._applied.get(name, Override())
            if kept == before:
                continue
            self._applied[name] = kept
            if kept.standing != before.standing or before.passing:
                overrides += [{name: value} for value in kept.standing]
            if kept.until_s > now_s:
                for_s = kept.until_s - now_s
                overrides += [{name: value, "for_s": for_s} for value in kept.passing]
        return overrides
