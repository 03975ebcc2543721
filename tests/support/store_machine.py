"""A machine's KV store and its engines, one at a time, in a process of their own."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

from headrace_kvstore.arena.arena import Arena
from headrace_kvstore.blocks.slot_record import READY
from tests.support.cross_layer_models import FusingEngines
from tests.support.machine import until

DRAM_BYTES, ANSWER = 64 << 20, 8


class StoreMachine:
    """An arena, and a process that makes engines over it.

    Args:
        folder: of the arena.
        step_tokens: of the engines.
    """

    def __init__(self, folder: Path, step_tokens: int) -> None:
        self._step_tokens = step_tokens
        self.store = {
            "name": f"headrace-test-{uuid.uuid4().hex[:12]}",
            "folder": str(folder),
            "dram_bytes": DRAM_BYTES,
            "node": False,
        }
        self.engines = FusingEngines()

    def open(self, model: Path, **more: Any) -> None:
        """An engine in place of the one before."""
        options = {"store": self.store, "max_num_batched_tokens": self._step_tokens} | more
        self.engines.do("open", model=str(model), **options)

    def ask(self, *prompts: list[int]) -> list[Any]:
        found: list[Any] = self.engines.do("answers", prompts=prompts, max_tokens=ANSWER)
        return found

    def forget(self) -> None:
        """Empty the engine's own cache."""
        until(lambda: self.engines.do("forget"))

    def arena(self) -> Arena:
        return Arena.create_or_attach(
            self.store["name"], DRAM_BYTES, folder=Path(self.store["folder"])
        )

    def stored(self) -> int:
        with self.arena() as arena:
            return int((arena.table["state"] == READY).sum())

    def flip(self, depth: int) -> None:
        """Flip a bit in each layer of the stored blocks of this depth."""
        with self.arena() as arena:
            table = arena.table
            for slot in ((table["state"] == READY) & (table["depth"] == depth)).nonzero()[0]:
                arena.view(int(slot))[1000::4096] ^= 0x10
