"""`Windowed` with recurrent layers beside full attention: a model that knows whether its states are
right, too.

A recurrent layer's state is a number that covers all tokens before it. As vLLM's workers do, a step
reads the state in the block of the last computed token, and writes the new one into the block of
the last token that it computes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from vllm.v1.kv_cache_interface import MambaSpec
from vllm.v1.request import Request

from tests.support.scheduled import BLOCK, SPEC, recurrent
from tests.support.windowed import LAYER_BYTES, Windowed

STATES = (recurrent(), SPEC, recurrent(32))
"""Cache groups as of Qwen3-Next: full attention beside several groups of recurrent layers."""


class Recurrent(Windowed):
    """An engine; arguments as `Windowed`."""

    def __init__(self, *arguments: Any, groups: Any = STATES, **options: Any) -> None:
        self.specs = list(groups)
        super().__init__(*arguments, groups=groups, **options)

    def group_attends(self, group: int, table: list[int], tokens: list[int], start: int) -> bool:
        if not isinstance(self.specs[group], MambaSpec):
            return super().group_attends(group, table, tokens, start)
        numbers, right = self.numbers(tokens), True
        written = table[(len(tokens) - 1) // BLOCK]
        if not written:
            raise AssertionError("a state is written to the null block")
        for name in self.groups[group]:
            cache, layer = self.caches[name], self.names.index(name)
            if start:
                read = cache[table[(start - 1) // BLOCK]]
                right &= bool((read == float(numbers[start - 1] + layer)).all())
            cache[written] = float(numbers[-1] + layer)
        return right

    @property
    def stored_layers(self) -> list[int]:
        names = self.groups[self.specs.index(SPEC)]
        return [self.names.index(name) for name in names]

    def states(self, request: Request) -> list[bool]:
        """Whether the store has the state after each block of a request, of all groups. Its content
        must be right."""
        arena, row = self.connector.arena, self.connector._opened.row
        groups, truth = self.connector._opened.groups.states, self.numbers(request.all_token_ids)
        found = []
        for number, block in enumerate(map(bytes, request.block_hashes)):
            names = [groups.name(block, group) for group in groups.recurrent]
            slots = arena.lookup(row, names).tolist()
            for group, slot in zip(groups.recurrent, slots, strict=True):
                [(floats,)] = self.specs[group].shapes
                for page, name in enumerate(self.groups[group] if slot >= 0 else ()):
                    first = page * LAYER_BYTES
                    state = arena.view(slot)[first : first + 4 * floats].view(np.float32)
                    wanted = truth[(number + 1) * BLOCK - 1] + self.names.index(name)
                    assert (state == wanted).all(), "the store has a wrong state"
            found.append(min(slots) >= 0)
        return found

    def flip(self, name: bytes, page: int = 0) -> None:
        """Flip bits of a block in the store, in one page."""
        arena, row = self.connector.arena, self.connector._opened.row
        [slot] = arena.lookup(row, [name]).tolist()
        arena.view(slot)[page * LAYER_BYTES : page * LAYER_BYTES + 64] ^= 0x80

    def state_name(self, request: Request, blocks: int, group: int) -> bytes:
        """Name of a group's state after so many blocks of a request."""
        groups = self.connector._opened.groups.states
        return groups.name(bytes(request.block_hashes[blocks - 1]), group)
