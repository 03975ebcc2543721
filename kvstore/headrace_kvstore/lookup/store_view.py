"""View of the blocks of a prompt in this machine's KV store, for planners on that machine.

The arena is shared memory, so the planner reads it directly, as the engines do. So it knows exactly
which blocks DRAM holds, for the price of hashing the prompt. For tiers below DRAM it asks the
machine's StoreNode (`find_available`). The engine reports its blocks' namespace with its
statistics; until then the view is empty.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np

from headrace_kvstore.arena.arena import Arena
from headrace_kvstore.lookup.availability import DRAM, AvailableRun
from headrace_kvstore.lookup.lookup_client import LookupClient
from headrace_kvstore.lookup.state_hits import StateHits
from headrace_kvstore.settings.store_settings import StoreSettings

logger = logging.getLogger("headrace.kvstore")

ARENA_CHECK_S = 1.0
"""Time between checks whether the arena was replaced; each takes 3 us."""

Hasher = Callable[[Sequence[int], str], list[bytes]]
"""(token ids, salt) -> vLLM's hashes of the prompt's full blocks."""


class StoreView:
    """One engine's view of its machine's arena.

    Args:
        settings: of the engine's store.
        digest: gives the namespace of the engine's blocks, empty until it is known.
        hashes: hashes blocks as the engine does.
        block_tokens: tokens of a block.
        lookup_client: asks the machine's node; None makes one.
        states: gives the numbers of the engine's cache groups of recurrent layers. Then a prefix is
            held only with the states after it.
    """

    def __init__(
        self,
        settings: StoreSettings,
        digest: Callable[[], bytes],
        hashes: Hasher,
        block_tokens: int,
        lookup_client: LookupClient | None = None,
        states: Callable[[], Sequence[int]] = tuple,
    ) -> None:
        self._settings, self._digest, self._states = settings, digest, states
        self._hashes, self._block_tokens = hashes, block_tokens
        self._lookup_client = lookup_client or LookupClient(
            settings.name, socket_folder=settings.socket_folder
        )
        self._arena: Arena | None = None
        self._look_at_s = 0.0
        self._namespace_id: int | None = None

    def held_tokens(self, token_ids: Sequence[int], salt: str) -> int:
        """Return how many leading tokens of a prompt have KV in DRAM. Never raises."""
        hashes, held = self._look(token_ids, salt)
        return self._hit(hashes[:held]) * self._block_tokens

    async def available_runs(
        self, token_ids: Sequence[int], salt: str, compute_s: float
    ) -> list[AvailableRun]:
        """Return the leading tokens of a prompt that the store could supply, by medium; those below
        DRAM only if the node answers in time. Never raises.

        Args:
            compute_s: seconds to compute a block.
        """
        hashes, held = self._look(token_ids, salt)
        # The last token is always computed, so the block that it completes is never loaded.
        usable = (len(token_ids) - 1) // self._block_tokens
        if self._state_hits is None:
            usable = max(held, usable)
        found = await self._available(hashes[:usable], min(held, usable), compute_s)
        return [run._replace(length=run.length * self._block_tokens) for run in found]

    async def _available(
        self, hashes: Sequence[bytes], held: int, compute_s: float
    ) -> list[AvailableRun]:
        """Return the leading blocks that the store could supply, by medium.

        Args:
            held: number of leading blocks whose KV is in DRAM.
        """
        hit = self._hit(hashes[:held])
        here, end = [AvailableRun(DRAM, hit)] * (hit > 0), len(hashes)
        if not self._settings.node or hit == end:
            return here
        states = self._state_hits
        if states is not None:
            names = states.last_names(hashes)
            end = self._hit(hashes, await self._lookup_client.find_held(self._digest(), names))
            if end <= hit:
                return here
        rest, below = hashes[held:end], list[AvailableRun]()
        if rest:
            below = await self._lookup_client.available_runs(self._digest(), rest, compute_s)
        if states is not None and sum(run.length for run in below) < len(rest):
            return here
        return [AvailableRun(DRAM, min(held, end))] * (held > 0) + below

    @property
    def _state_hits(self) -> StateHits | None:
        """Hits of the engine; None if it has no recurrent layers."""
        groups = tuple(self._states())
        return StateHits(groups) if groups else None

    def _hit(self, hashes: Sequence[bytes], below: Collection[bytes] = ()) -> int:
        """Return how many of these leading blocks an engine can use: with recurrent layers, only
        those with a state after them, in DRAM or among the blocks `below`."""
        states = self._state_hits
        if states is None:
            return len(hashes)

        def lacking(names: Sequence[bytes]) -> list[bool]:
            there = zip(names, self.holds(names), strict=True)
            return [not held and name not in below for name, held in there]

        return states.hit(hashes, lacking)

    def holds(self, hashes: Sequence[bytes]) -> list[bool]:
        """Return, for each block, whether DRAM has it. Never raises."""
        opened = self._open()
        if not hashes or opened is None:
            return [False] * len(hashes)
        arena, namespace_id = opened
        try:
            return [bool(one) for one in arena.lookup(namespace_id, hashes) >= 0]
        except Exception:
            logger.exception("the arena cannot be read")
            return [False] * len(hashes)

    @property
    def lookup_failures(self) -> Mapping[str, int]:
        """Number of questions to the node without an answer, by the error or reply in its place."""
        return self._lookup_client.failures

    def pin(self, token_ids: Sequence[int], salt: str, pinned: bool = True) -> int:
        """Pin a prompt's blocks in DRAM, or unpin them; with recurrent layers, those of the longest
        hit and the states after it. Return how many leading tokens of the prompt are there and,
        with `pinned`, are pinned: pins have a limit (`Arena.pin`)."""
        opened = self._open()
        if opened is None:
            return 0
        arena, namespace_id = opened
        hashes, after, states = self._hashes(token_ids, salt), list[bytes](), self._state_hits
        if states is not None:
            hashes = hashes[: self.held_tokens(token_ids, salt) // self._block_tokens]
            after = states.names(hashes[-1]) if hashes else []
        held = arena.pin(namespace_id, [*hashes, *after], pinned)
        if after and not held.all():
            return 0
        return _leading(held[: len(hashes)]) * self._block_tokens

    def stats(self) -> dict[str, Any]:
        """Return the arena's statistics; empty while it is not known."""
        opened = self._open()
        return {} if opened is None else opened[0].stats()

    def close(self) -> None:
        """Close the arena and the connection to the node."""
        self._lookup_client.close()
        arena, self._arena = self._arena, None
        if arena is not None:
            arena.close()

    def _look(self, token_ids: Sequence[int], salt: str) -> tuple[list[bytes], int]:
        """Return the hashes of a prompt's full blocks, and how many leading ones DRAM has."""
        opened = self._open() if len(token_ids) >= self._block_tokens else None
        if opened is None:
            return [], 0
        arena, namespace_id = opened
        try:
            hashes = self._hashes(token_ids, salt)
            return hashes, _leading(arena.lookup(namespace_id, hashes) >= 0)
        except Exception:
            logger.exception("the arena cannot be read")
            return [], 0

    def _open(self) -> tuple[Arena, int] | None:
        """Map the arena if need be. Return it and the id of the engine's namespace; None if the
        namespace is not in it."""
        digest = self._digest()
        self._leave_replaced()
        if self._namespace_id is not None and self._arena is not None:
            if self._arena.namespace_info(self._namespace_id).digest == digest:
                return self._arena, self._namespace_id
            self._namespace_id = None  # given to another namespace, after the engine had ended
        if not digest:
            return None
        if self._arena is None:
            try:
                self._arena = Arena.attach(self._settings.name, self._settings.folder)
            except (OSError, ValueError) as error:
                logger.error("no view of the arena %s: %s", self._settings.name, error)
                return None
        self._namespace_id = self._arena.find_namespace(digest)
        return None if self._namespace_id is None else (self._arena, self._namespace_id)

    def _leave_replaced(self) -> None:
        """Close the arena if another one has taken its name."""
        now_s = time.monotonic()
        if self._arena is not None and now_s >= self._look_at_s:
            self._look_at_s = now_s + ARENA_CHECK_S
            if self._arena.replaced():
                logger.warning("the arena %s was replaced", self._settings.name)
                self._arena.close()
                self._arena = self._namespace_id = None


def store_settings(transfer: Any) -> StoreSettings | None:
    """Return the store's settings in vLLM's KVTransferConfig, alone or beside other connectors."""
    if transfer is None:
        return None
    extra = transfer.kv_connector_extra_config or {}
    if transfer.kv_connector == "HeadraceConnector":
        return StoreSettings.parse(extra)
    for child in extra.get("connectors", ()):
        if child.get("kv_connector") == "HeadraceConnector":
            return StoreSettings.parse(child.get("kv_connector_extra_config") or {})
    return None


def _leading(held: np.ndarray) -> int:
    """Return how many are True before the first that is not."""
    return int(len(held) if held.all() else held.argmin())
