"""Reads blocks from objects into memory.

Adjacent blocks of one object come with one request, a *run*. The answer lands in memory of its
own. From there it is copied to its destination in the same pass that computes its checksums. So
a caller may give up at any time: a run that has not begun to copy never touches the caller's
memory.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np

from headrace_kvstore.checksum import block_seed, copy_sum, layer_seeds
from headrace_kvstore.objects.object_catalog import Place

RUN_BYTES = 8 * 2**20


def plan_runs(places: Sequence[Place], run_bytes: int = RUN_BYTES) -> list[list[int]]:
    """Positions in `places`, grouped to what one request brings: neighbours in one object, of
    `run_bytes` together at most, or one block."""
    order = sorted(
        range(len(places)), key=lambda i: (str(places[i].bundle.name), places[i].position)
    )
    runs: list[list[int]] = []
    for i in order:
        place = places[i]
        size = place.bundle.name.shape.payload_bytes
        last = places[runs[-1][-1]] if runs else None
        if (
            last is not None
            and last.bundle is place.bundle
            and last.position + 1 == place.position
            and (len(runs[-1]) + 1) * size <= run_bytes
        ):
            runs[-1].append(i)
        else:
            runs.append([i])
    return runs


class ObjectRead:
    """A `staging.sources.Fill`. Runs are settled by the tier's workers, or given up.

    Args:
        places: blocks of one shape.
        addresses: u64 (blocks, layers), where each layer goes.
        deadline_s: monotonic seconds at which the tier gives it up.
    """

    def __init__(
        self, places: Sequence[Place], addresses: np.ndarray, deadline_s: float, run_bytes: int
    ) -> None:
        self.places = list(places)
        self.addresses = np.ascontiguousarray(addresses, np.uint64)
        self.deadline_s = deadline_s
        self.runs = plan_runs(self.places, run_bytes)
        self._ok = np.zeros(len(self.places), np.bool_)
        self._changed = threading.Condition()
        self._open, self._copying = len(self.runs), 0
        self._given_up = False
        self._calls: list[Callable[[], None]] = []

    def begin_copy(self) -> bool:
        """A run's bytes are here; False if nobody wants them any more."""
        with self._changed:
            if not self._given_up:
                self._copying += 1
            return not self._given_up

    def settle(self, run: Sequence[int], good: np.ndarray | None, copied: bool) -> None:
        """A run is over: which of its blocks are right, None if none is."""
        with self._changed:
            if copied:
                self._copying -= 1
                if good is not None and not self._given_up:
                    self._ok[list(run)] = good
            self._open -= 1
            calls = self._take_calls()
        for call in calls:
            call()

    def _take_calls(self) -> list[Callable[[], None]]:
        if not self._over:
            return []
        self._changed.notify_all()
        calls, self._calls = self._calls, []
        return calls

    @property
    def _over(self) -> bool:
        return not self._copying and (self._given_up or not self._open)

    @property
    def given_up(self) -> bool:
        """Runs that have not begun need not begin."""
        return self._given_up

    def done(self) -> bool:
        """The memory is nobody's but the caller's again."""
        with self._changed:
            return self._over

    def when_done(self, call: Callable[[], None]) -> None:
        """Call this, on any thread, once `done`; at once if it is."""
        with self._changed:
            if not self._over:
                self._calls.append(call)
                return
        call()

    def call_off(self) -> None:
        """Do without what has not come; all blocks count as not there."""
        with self._changed:
            self._given_up = True
            self._ok[:] = False
            calls = self._take_calls()
        for call in calls:
            call()

    def wait(self, timeout_s: float | None = None) -> np.ndarray:
        """Which blocks are in memory whole and proven right: bool (blocks,).

        Raises TimeoutError while bytes may still arrive.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._over, timeout_s):
                raise TimeoutError("blocks are still on their way")
            return self._ok.copy()


def copy_verified(
    source: int, places: Sequence[Place], addresses: np.ndarray, sums: np.ndarray
) -> np.ndarray:
    """Copy payloads that lie one behind the other at `source` to u64 addresses (blocks, layers);
    which have these sums, u64 (blocks, layers): bool (blocks,)."""
    shape = places[0].bundle.name.shape
    digest, layers = shape.digest, shape.layers
    seeds = layer_seeds([block_seed(digest, place.block.hash) for place in places], layers)
    count = len(places) * layers
    sources = source + np.arange(count, dtype=np.uint64) * np.uint64(shape.layer_bytes)
    got = copy_sum(addresses.reshape(-1), sources, shape.layer_bytes, seeds.reshape(-1))
    good: np.ndarray = (got.reshape(sums.shape) == sums).all(axis=1)
    return good
