"""Computation of the runs of a prompt that each node's store can supply; compiled."""

from __future__ import annotations

from typing import Any

import numpy as np

from headrace_kvstore.compiled import jit

DRAM, NVME, REMOTE, OBJECT = range(4)
"""Media of a node's store, as in `headrace_kvstore.supply.MEDIA`."""


@jit()
def find_runs(ask: Any, held: Any, dram: Any, store: Any, objects: int, loads: Any) -> Any:
    """Return the runs of a prompt that each node's store can supply.

    Args:
        held: leading blocks that each holder has, i32 [holders].
        dram, store: holders of each node's DRAM and of any of its tiers, [nodes]; -1 for none.
        objects: the objects' holder; -1 for none.
        loads: (fixed_s, byte_s), [nodes, media, 2]; inf where a medium cannot be had.

    Returns:
        (lengths i64 [nodes, 4], in tokens, waits f64 [nodes, 4], media i64 [nodes, 4])
    """
    nodes = len(dram)
    lengths = np.zeros((nodes, 4), np.int64)
    waits = np.zeros((nodes, 4))
    media = np.zeros((nodes, 4), np.int64)
    anywhere = 0
    for node in range(nodes):
        if 0 <= store[node] < len(held):
            anywhere = max(anywhere, held[store[node]])
    in_objects = held[objects] if 0 <= objects < len(held) else 0
    for node in range(nodes):
        end = 0
        for medium in range(4):
            media[node, medium] = medium
            reach = 0
            if medium == DRAM:
                if 0 <= dram[node] < len(held):
                    reach = held[dram[node]]
            elif medium == NVME:
                if 0 <= store[node] < len(held):
                    reach = held[store[node]]
            elif store[node] >= 0:
                reach = anywhere if medium == REMOTE else in_objects
            if reach > end and loads[node, medium, 1] < np.inf:
                tokens = (reach - end) * ask.block_tokens
                lengths[node, medium] = tokens
                if medium >= REMOTE:
                    size = tokens * ask.token_bytes
                    waits[node, medium] = loads[node, medium, 0] + loads[node, medium, 1] * size
                end = reach
    return lengths, waits, media
