"""Orders of an administrator, which outlive the replicas that received them.

The cluster keeps the orders in force. A gateway notes an order before it tells the replicas. Each
replica reads the notes when it starts and every few seconds, so a replica that starts just then, or
was not reached, follows the order, too. Orders end when the app is deleted.

    policy        where prompts are prefilled
    mode          how replicas draft
    draft_cap     maximum number of draft tokens a step

An order is either standing, or passing: it holds until a time, and then the standing order holds
again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec

FIELDS = ("policy", "mode", "draft_cap")

Value = Annotated[tuple[Any, ...], msgspec.Meta(max_length=1)]


class Noted(msgspec.Struct, frozen=True):
    """One field's orders, as the cluster keeps them. Times are Unix seconds.

    Attributes:
        standing: the standing order's value in a tuple; empty if none was ever given.
        passing: likewise, of the order that holds until `until_s`.
    """

    standing: Value = ()
    passing: Value = ()
    until_s: float = 0.0

    def given(self, value: Any, now_s: float, for_s: float | None) -> Noted:
        """Return the orders after a new one. A standing order ends a passing one."""
        if for_s is None:
            return Noted((value,))
        return Noted(self.standing, (value,), now_s + for_s)

    @classmethod
    def of(cls, note: bytes | None) -> Noted:
        """Read orders from JSON. There are none if there is no note, or it is not one of ours."""
        try:
            return msgspec.json.decode(note or b"{}", type=cls)
        except msgspec.DecodeError:
            return cls()


@dataclass(slots=True)
class Notes:
    """An app's notes. Every method blocks for about a millisecond.

    Args:
        app: the Serve application's name.
        read, write: read and write the cluster's notes, by key.
    """

    app: str
    read: Callable[[str], bytes | None]
    write: Callable[[str, bytes], None]

    def give(self, order: Mapping[str, Any], now_s: float) -> None:
        """Note an order: any of `FIELDS`, and `for_s` if it holds for so many seconds only."""
        for name in FIELDS:
            if name in order:
                key = prefix(self.app) + name
                noted = Noted.of(self.read(key))
                noted = noted.given(order[name], now_s, order.get("for_s"))
                self.write(key, msgspec.json.encode(noted))

    def all(self) -> dict[str, Noted]:
        """Return the orders that are noted for each field."""
        return {name: Noted.of(self.read(prefix(self.app) + name)) for name in FIELDS}


@dataclass(slots=True)
class Obedience:
    """Orders that a replica has carried out, to find those that it still has to carry out."""

    _obeyed: dict[str, Noted] = field(default_factory=dict)

    def news(self, noted: Mapping[str, Noted], now_s: float) -> list[dict[str, Any]]:
        """Return the orders to carry out, in sequence, each as `Notes.give` took it."""
        orders: list[dict[str, Any]] = []
        for name, kept in noted.items():
            before = self._obeyed.get(name, Noted())
            if kept == before:
                continue
            self._obeyed[name] = kept
            if kept.standing != before.standing or before.passing:
                orders += [{name: value} for value in kept.standing]
            if kept.until_s > now_s:
                for_s = kept.until_s - now_s
                orders += [{name: value, "for_s": for_s} for value in kept.passing]
        return orders


def prefix(app: str) -> str:
    """Return the beginning of the keys of an app's notes."""
    return f"headrace-order/{app}/"
