"""The cache groups of an engine with recurrent layers (Mamba, GDN).

A recurrent layer keeps a state in place of KV: that of a whole prefix, which is in the engine at
some block boundaries only. So a stored block of such an engine is one block of its pool: the pages
of one group's layers. `headrace_kvstore.lookup.state_hits` names them and finds hits. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headrace_kvstore.lookup.state_hits import StateHits


@dataclass(frozen=True)
class StateGroups(StateHits):
    """Numbers of the groups.

    Attributes:
        attention: number of the attention layers' group.
    """

    attention: int

    def of_prefix(
        self, blocks: Sequence[bytes], tables: Sequence[Sequence[int]], start: int
    ) -> tuple[list[int], list[bytes]]:
        """Return the engine's blocks that a hit is loaded into, and the names of what goes there:
        the KV of all blocks, and the states after the last one.

        Args:
            blocks: names of the hit's blocks, at least one.
            tables: the request's block ids, a list for each cache group.
            start: number of the prompt's blocks before them.
        """
        end = start + len(blocks)
        ids = [*tables[self.attention][start:end]]
        ids += [tables[group][end - 1] for group in self.recurrent]
        return ids, [*blocks, *self.names(blocks[-1])]
