"""How much of what the KV store could supply an engine takes, as the plan expects it.

What stands in DRAM at a prompt's beginning is always loaded. Behind it, a run of blocks is taken up
to that end of a run where the predicted seconds are fewest:

    wait + max(T(u), L)

``wait`` is until what is remote or in objects has come into DRAM, ``T`` the engine's time for the
``u`` tokens that are left to compute, ``L`` the load, which runs under the computation. Within a
run both ways grow about linearly, so the best place is an end (as in the engine's own choice,
``headrace_kvstore.connector.load_price``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from headrace_kvstore.supply import DRAM, NVME, Supply


@dataclass(frozen=True, slots=True)
class Loaded:
    """Tokens that an engine loads from the store, by the medium that holds them now."""

    by_medium: Mapping[str, int] = field(default_factory=dict)
    #: Predicted seconds before the engine can begin.
    wait_s: float = 0.0

    @property
    def tokens(self) -> int:
        return sum(self.by_medium.values())

    def bytes_read(self, token_bytes: int) -> dict[str, int]:
        """Bytes by the medium that the engine itself reads: what is pulled is read from DRAM."""
        read: dict[str, int] = {}
        for medium, tokens in self.by_medium.items():
            source = NVME if medium == NVME else DRAM
            read[source] = read.get(source, 0) + tokens * token_bytes
        return read


def worth_loading(
    supplies: Sequence[Supply],
    cached_tokens: int,
    useful_tokens: int,
    seconds: Callable[[Loaded], float],
) -> Loaded:
    """What of a prompt's leading runs an engine loads.

    Args:
        supplies: from the prompt's beginning on, in tokens.
        cached_tokens: at its beginning that the engine's own cache has.
        useful_tokens: that may be loaded at most.
        seconds: predicted, when it loads this and computes the rest.
    """
    options = [Loaded()]
    taken: dict[str, int] = {}
    wait_s, end = 0.0, 0
    for supply in supplies:
        begin, end = max(end, cached_tokens), end + supply.length
        new = min(end, useful_tokens) - begin
        if new <= 0:
            continue
        taken = {**taken, supply.medium: taken.get(supply.medium, 0) + new}
        wait_s += supply.wait_s * new / supply.length
        options.append(Loaded(taken, wait_s))
        if taken.keys() == {DRAM}:
            options = options[-1:]
    return min(reversed(options), key=seconds)
