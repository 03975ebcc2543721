"""The adapters that an engine has loaded, and the seconds that loading one takes. Pure.

The engine keeps a number of adapters and drops the least recently used one for a new one
(`max_cpu_loras`). `LoadedAdapters` follows that from the requests. It may be wrong for a moment:
then an adapter is loaded within a step, or is asked for once more, which costs little.
"""

from __future__ import annotations

from collections import OrderedDict

PRIOR_LOAD_S = 0.2
"""Seconds of a load before the first one was measured."""
GAIN = 0.3
"""Weight of the newest load in the mean."""


class LoadedAdapters:
    """The adapters of one engine, least recently used first.

    Args:
        capacity: maximum number of adapters that the engine keeps.

    Attributes:
        load_s: predicted seconds of a load. loads: number of loads.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._digests: OrderedDict[int, str] = OrderedDict()
        self.load_s, self.loads = PRIOR_LOAD_S, 0

    def use(self, number: int) -> bool:
        """Return whether the adapter of this number is loaded; it is then the last one used."""
        if number not in self._digests:
            return False
        self._digests.move_to_end(number)
        return True

    def add(self, number: int, digest: str, seconds: float) -> None:
        """Record a load that took so many seconds."""
        self._digests[number] = digest
        while len(self._digests) > self._capacity:
            self._digests.popitem(last=False)
        gain = GAIN if self.loads else 1.0
        self.load_s += gain * (seconds - self.load_s)
        self.loads += 1

    @property
    def digests(self) -> tuple[str, ...]:
        """Digests of the loaded adapters' content, each once."""
        return tuple(dict.fromkeys(self._digests.values()))
