"""The adapters that administrators have added, kept with the cluster for replicas that start later.

They end when the app is deleted, like the overrides (`serving.settings_override`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from headrace_engine.serving.settings_override import prefix

_decode = msgspec.json.Decoder(dict[str, str]).decode


@dataclass(slots=True)
class AddedAdapters:
    """Sources of a model's added adapters, by name. Every method blocks for about a millisecond.

    Args:
        app: the Serve application's name.
        read, write: read and write the cluster's values, by key.
        group: the model's name in the configuration; empty if it is the app's only model.
    """

    app: str
    read: Callable[[str], bytes | None]
    write: Callable[[str, bytes], None]
    group: str = ""

    def all(self) -> dict[str, str]:
        """Return the sources of all added adapters."""
        try:
            return _decode(self.read(self._key) or b"{}")
        except msgspec.DecodeError:
            return {}

    def set(self, name: str, source: str | None) -> dict[str, str]:
        """Set or remove (None) the source of a name; return all sources."""
        sources = self.all()
        sources.pop(name, None)
        if source is not None:
            sources[name] = source
        self.write(self._key, msgspec.json.encode(sources))
        return sources

    @property
    def _key(self) -> str:
        return prefix(self.app) + (f"{self.group}/adapters" if self.group else "adapters")
