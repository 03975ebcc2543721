"""The values that the cluster keeps for a model of an app, until the app is deleted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(slots=True)
class ModelValues:
    """Values of one model. Methods that use the cluster block for about a millisecond.

    Args:
        app: the Serve application's name.
        read, write: read and write the cluster's values, by key.
        group: the model's name in the configuration; empty if it is the app's only model.
    """

    app: str
    read: Callable[[str], bytes | None]
    write: Callable[[str, bytes], None]
    group: str = ""

    def key(self, name: str) -> str:
        """Return the cluster's key of the value with this name."""
        return prefix(self.app) + (f"{self.group}/{name}" if self.group else name)


def prefix(app: str) -> str:
    """Return the beginning of the keys of an app's values."""
    return f"headrace-order/{app}/"
