"""vLLM's own scheduler over full attention beside sliding windows, with both sides of the store's
connector and a model that knows whether its KV is right.

The model writes a number that covers all tokens so far into each layer, and samples GOOD only if
all KV that it attends to is right.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import SlidingWindowSpec
from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from headrace_kvstore.blocks.slot_record import READY
from tests.support.scheduled import BLOCK, PAGE, SPEC, STEP, Scheduled, sliding

GOOD, BAD = 30, 666
WINDOW = BLOCK + 40
HEADS, CONTENT = 2, 128
GROUPS = (sliding(WINDOW), SPEC)
"""As vLLM groups the layers of Gemma 3 and gpt-oss, whose first layer has a window."""
FLOAT_BYTES = 4
LAYER_BYTES = BLOCK * HEADS * CONTENT * FLOAT_BYTES


class Windowed(Scheduled):
    """An engine that computes.

    Args:
        folder: of the arena.
        asynchronous: whether it schedules two steps before it reads the first output.
        groups: specs of its cache groups.
        drafts: number of draft tokens after each token; from none to all of them are right in turn.
        options: as `Scheduled`.
    """

    def __init__(
        self,
        folder: Path,
        asynchronous: bool = False,
        groups: Sequence[Any] = GROUPS,
        drafts: int = 0,
        **options: Any,
    ) -> None:
        if drafts:
            method = {"method": "ngram", "prompt_lookup_max": 2}
            options["speculative_config"] = method | {"num_speculative_tokens": drafts}
        kind = AsyncScheduler if asynchronous else Scheduler
        super().__init__(
            folder, scheduler=kind, asynchronous=asynchronous, groups=groups, **options
        )
        self.depth = 2 if asynchronous else 1
        self._drafts, self._guesses = drafts, itertools.cycle(range(drafts + 1))
        self.flight: list[tuple[Any, KVConnectorOutput, dict[str, list[int]]]] = []
        self.tables: dict[str, list[list[int]]] = {}
        self.windows = [
            spec.sliding_window if isinstance(spec, SlidingWindowSpec) else None for spec in groups
        ]
        self.pool = self.scheduler.kv_cache_manager.block_pool
        self._numbers: dict[tuple[int, ...], np.ndarray] = {}

    def step(self) -> None:
        while len(self.flight) < self.depth:
            self.flight.append(self.computed(self.scheduler.schedule()))
        output, told, sampled = self.flight.pop(0)
        names = list(output.num_scheduled_tokens)
        places = {name: number for number, name in enumerate(names)}
        tokens = [sampled[name] for name in names]
        result = ModelRunnerOutput(names, places, tokens, kv_connector_output=told)
        self.scheduler.update_from_output(output, result)
        if self._drafts:
            names = [request.request_id for request in self.scheduler.running]
            right = zip(names, self._guesses, strict=False)
            drafts = [[GOOD] * n + [BAD] * (self._drafts - n) for _, n in right]
            self.scheduler.update_draft_token_ids(DraftTokenIds(names, drafts))

    def computed(self, output: Any) -> tuple[Any, KVConnectorOutput, dict[str, list[int]]]:
        self.steps.append(dict(output.num_scheduled_tokens))
        worker = self.worker
        worker.bind_connector_metadata(output.kv_connector_metadata)
        worker.start_load_kv(STEP)
        for name in self.names:
            worker.wait_for_layer_load(name)
        sampled = self.sampled(output)
        return output, self.connector_output(), sampled

    def sampled(self, output: Any) -> dict[str, list[int]]:
        """Compute a step as vLLM's first runner does: by the scheduler's tables and counts."""
        computed = {}
        for new in output.scheduled_new_reqs:
            self.tables[new.req_id] = [list(ids) for ids in new.block_ids]
            computed[new.req_id] = new.num_computed_tokens
        cached = output.scheduled_cached_reqs
        for name, blocks, count in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            if name in cached.resumed_req_ids:
                self.tables[name] = [[] for _ in self.groups]
            for table, more in zip(self.tables[name], blocks or (), strict=False):
                table.extend(more)
            computed[name] = count
        sampled: dict[str, list[int]] = {}
        for name, count in output.num_scheduled_tokens.items():
            request, start = self.scheduler.requests[name], computed[name]
            end = start + count
            tokens = list(request.all_token_ids)
            whole = end >= len(tokens)
            drafts = output.scheduled_spec_decode_tokens.get(name, [])
            tokens += drafts
            tokens += [GOOD] * max(0, end - len(tokens))  # sampled by the step before, on a device
            right = self.attend(self.tables[name], tokens[:end], start)
            accepted = list(itertools.takewhile(lambda token: token == GOOD, drafts))
            sampled[name] = [*accepted, GOOD if right else BAD] if whole else []
        return sampled

    def attend(self, tables: list[list[int]], tokens: list[int], start: int) -> bool:
        """Write the KV of the tokens from `start` on; return whether all of it that they attend to
        is right."""
        each = [self.group_attends(n, table, tokens, start) for n, table in enumerate(tables)]
        return all(each)

    def group_attends(self, group: int, table: list[int], tokens: list[int], start: int) -> bool:
        """Do a cache group's part of `attend`."""
        numbers, right, window = torch.from_numpy(self.numbers(tokens)), True, self.windows[group]
        first = 0 if window is None else max(0, start - window + 1)
        places = torch.arange(first, len(tokens))
        blocks = torch.tensor(table)[places // BLOCK]
        if not blocks[start - first :].all():
            raise AssertionError("KV is written to the null block")
        where = blocks * (BLOCK // PAGE) + places % BLOCK // PAGE, 0, places % PAGE, 0
        new = tuple(x[start - first :] if torch.is_tensor(x) else x for x in where)
        for name in self.groups[group]:
            layer = self.names.index(name)
            self.caches[name][new] = numbers[start:] + layer
            right &= torch.equal(self.caches[name][where], numbers[first:] + layer)
        return right

    def numbers(self, tokens: Sequence[int]) -> np.ndarray:
        """Numbers of the tokens, each of which covers those before it."""
        key = tuple(tokens)
        if key not in self._numbers:
            found, number = np.empty(len(key), np.float32), 1
            for place, token in enumerate(key):
                number = (number * 31 + token) % 65521
                found[place] = number * 16
            self._numbers[key] = found
        return self._numbers[key]

    def ends(self) -> None:
        """Serve all requests to their end, and finish all copies."""
        self.until(lambda: not self.scheduler.requests and not self.connector.scheduler.busy)
        self.until(lambda: not any(output.num_scheduled_tokens for output, *_ in self.flight))

    def forget(self) -> None:
        """Empty the engine's own cache."""
        assert self.scheduler.reset_prefix_cache()
        for each in self.caches.values():
            each.zero_()

    def store(self, *prompts: Any, answer: int = 2) -> None:
        """Have the KV of prompts in the store and not in the engine."""
        for number, prompt in enumerate(prompts):
            self.add(f"stored {number}", prompt, answer)
            self.ends()
        self.forget()

    def answer(self, prompt: Any, name: str = "again", tokens: int = 5) -> Request:
        request = self.add(name, prompt, tokens)
        self.until(lambda: name not in self.scheduler.requests)
        return request

    def abort(self, name: str) -> None:
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def stored(self, request: Request) -> list[bool]:
        """Whether the store has each block of a request. Its content must be right."""
        arena, row = self.connector.arena, self.connector._opened.row
        names = [bytes(each) for each in request.block_hashes]
        slots, truth = arena.lookup(row, names).tolist(), self.numbers(request.all_token_ids)
        for number, slot in enumerate(slots):
            if slot < 0:
                continue
            stored = self.stored_layers
            layers = arena.view(slot)[: len(stored) * LAYER_BYTES]
            shape = len(stored), BLOCK // PAGE, HEADS, PAGE, CONTENT
            content = layers.view(np.float32).reshape(shape)[:, :, 0, :, 0]
            for layer, found in zip(stored, content.reshape(len(stored), BLOCK), strict=True):
                wanted = truth[number * BLOCK : (number + 1) * BLOCK] + layer
                assert (found == wanted).all(), "the store has wrong KV"
        return [slot >= 0 for slot in slots]

    def states(self, request: Request) -> list[bool]:
        """Whether the store has the state after each block of a request; empty without states."""
        return []

    @property
    def stored_layers(self) -> list[int]:
        """Numbers of the layers in a stored block."""
        return [*range(len(self.names))]

    def damage(self, depth: int, layer: int = 0) -> None:
        """Flip bits of a block in the store, in one layer."""
        arena = self.connector.arena
        table = arena.table
        [slot] = [s for s in (table["state"] == READY).nonzero()[0] if table["depth"][s] == depth]
        arena.view(int(slot))[layer * LAYER_BYTES + 3 : (layer + 1) * LAYER_BYTES : 4] ^= 0x80

    @property
    def is_pool_free(self) -> bool:
        """Whether no block is held any more, but vLLM's null block."""
        return self.pool.get_num_free_blocks() == len(self.pool.blocks) - 1


def counted(engine: Windowed, prefix: str) -> int:
    """Blocks that a worker counted under names that begin so."""
    counts = engine.worker._worker.counts
    return sum(n for what, n in counts.items() if what.startswith(prefix))
