"""One machine of a cluster, in processes of its own: an arena, a StoreNode, and engines over it."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from headrace_kvstore.arena.arena import Arena
from headrace_kvstore.blocks.slot_record import READY
from tests.support.stored import Stored, StoredEngine
from tests.support.storenode import StoreNodeProcess
from tests.support.tiny import KV_BYTES_PER_TOKEN, LAYERS, tiny_llama

BLOCK = 128
BLOCK_BYTES = BLOCK * KV_BYTES_PER_TOKEN
DRAM_BYTES = 40 << 20
LOGPROB_TOLERANCE = 1e-4
"""Nats. The cold run computes a prompt in one step, the warm one its last block only: float32 sums
in another order."""
PATIENCE_S = 200.0


class Machine:
    """Nothing runs until `engine` and `node.start`.

    Args:
        model: folder of the engines' model; None for the tiny Llama's.
        node: settings of the StoreNode.
    """

    def __init__(self, model: Path | None = None, **node: Any) -> None:
        self._model = model
        self.name = f"headrace-test-{uuid.uuid4().hex[:12]}"
        self.engines: list[StoredEngine] = []
        self.node = self._make_node(**node)

    def _make_node(self, **settings: Any) -> StoreNodeProcess:
        usual = {"dram_bytes": DRAM_BYTES, "block_bytes": BLOCK_BYTES, "layers": LAYERS}
        usual["secret"] = "of the nodes of these tests"
        return StoreNodeProcess(name=self.name, keep_arena=True, **(usual | settings))

    def change_node(self, **settings: Any) -> StoreNodeProcess:
        """Another node in the place of the one there is; returns once it listens."""
        self.node.kill()
        self.node = self._make_node(**settings)
        return self.node.start()

    def engine(
        self,
        ranks: int = 1,
        hands_over: bool = False,
        arguments: dict[str, Any] | None = None,
        **settings: Any,
    ) -> StoredEngine:
        """Starts; `ready` waits for it.

        Args:
            arguments: more of the engine's.
            settings: of its store.
        """
        store = {"name": self.name, "dram_bytes": DRAM_BYTES, "node_timeout_s": 10.0}
        store |= {"lease_s": 20.0, **settings}
        model, more = str(self._model or tiny_llama()), arguments or {}
        engine = StoredEngine(model, store, ranks=ranks, hands_over=hands_over, **more)
        self.engines.append(engine)
        return self.engines[-1]

    def arena(self) -> Arena:
        """The arena, as any process may open it."""
        return Arena.create_or_attach(self.name, DRAM_BYTES)

    def ready_blocks(self) -> int:
        """In DRAM."""
        with self.arena() as arena:
            return int((arena.table["state"] == READY).sum())

    def forget_dram(self) -> None:
        """Leave what is below DRAM."""
        with self.arena() as arena:
            arena.clear()

    def remove_dram(self) -> None:
        """As a restart of the machine does."""
        (Path("/dev/shm") / self.name).unlink(missing_ok=True)

    def from_below(
        self, engine: StoredEngine, prompt: list[int], salt: str | None = None
    ) -> Stored:
        """A prompt's answer with all its full blocks found, none of them in DRAM; asked again as
        long as the node was slow to answer."""
        answers: list[Stored] = []

        def found() -> bool:
            self.forget_dram()
            answers[:] = engine.answers([prompt], [salt], anew=True)
            return answers[0].cached == full_tokens(prompt)

        until(found)
        return answers[0]

    def end(self) -> None:
        """Kill all there is, and give the memory back."""
        for engine in self.engines:
            engine.kill()
        self.node.kill()
        self.remove_dram()


def full_tokens(prompt: Sequence[int]) -> int:
    """Tokens of a prompt in full blocks, but for the last token: what a store can supply."""
    return (len(prompt) - 1) // BLOCK * BLOCK


def until(condition: Callable[[], bool]) -> None:
    """Wait for it; fails the test if it does not come about."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "it does not come about"
        time.sleep(0.05)


def assert_same(answers: Sequence[Stored], cold: Sequence[Stored]) -> None:
    """Same tokens, and log-probabilities within the tolerance."""
    for answer, truth in zip(answers, cold, strict=True):
        assert answer.tokens == truth.tokens
        assert answer.logprobs == pytest.approx(truth.logprobs, abs=LOGPROB_TOLERANCE)
