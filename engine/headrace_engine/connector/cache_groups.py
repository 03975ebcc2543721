"""The KV cache groups of an engine, seen from its layers.

The layers of one group have the same block ids. A stored block holds all layers of its tokens,
whatever their groups, so that engines with other groups find the same blocks. With recurrent layers
a stored block holds one group's layers (`state_groups`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from headrace_engine.connector.state_groups import StateGroups


@dataclass(frozen=True)
class CacheGroups:
    """An engine's groups.

    Attributes:
        of_layer: number of each layer's group, by name.
        spec: of any layer (vLLM's AttentionSpec), a recurrent one (MambaSpec) if there are any; all
            layers have the same size.
        frees_early: whether vLLM frees blocks of a request that still runs, since they have left an
            attention window. Their place in the request's table is then vLLM's null block.
        states: which groups are of recurrent layers; None if there are none.
    """

    of_layer: dict[str, int]
    spec: Any
    frees_early: bool
    states: StateGroups | None = None

    @property
    def count(self) -> int:
        """Number of groups."""
        return 1 + max(self.of_layer.values())

    @property
    def stored_layers(self) -> int:
        """Number of layers in a stored block."""
        if self.states is None:
            return len(self.of_layer)
        numbers = [*self.of_layer.values()]
        return max(map(numbers.count, set(numbers)))

    @property
    def recovers_blocks(self) -> bool:
        """Whether vLLM computes single blocks that failed to load. Else it computes the whole
        request: it knows no single blocks of several groups, and computing a block needs the window
        before it."""
        return self.count == 1 and not self.frees_early
