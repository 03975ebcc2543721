"""The adapters that administrators have added, kept with the cluster for replicas that start later.

They end when the app is deleted, like all values of a model (`serving.model_values`).
"""

from __future__ import annotations

import msgspec

from headrace_engine.serving.model_values import ModelValues

_decode = msgspec.json.Decoder(dict[str, str]).decode
_NAME = "adapters"


class AddedAdapters(ModelValues):
    """Sources of a model's added adapters, by name."""

    __slots__ = ()

    def all(self) -> dict[str, str]:
        """Return the sources of all added adapters."""
        try:
            return _decode(self.read(self.key(_NAME)) or b"{}")
        except msgspec.DecodeError:
            return {}

    def set(self, name: str, source: str | None) -> dict[str, str]:
        """Set or remove (None) the source of a name; return all sources."""
        sources = self.all()
        sources.pop(name, None)
        if source is not None:
            sources[name] = source
        self.write(self.key(_NAME), msgspec.json.encode(sources))
        return sources
