"""What must hold of a `DeviceCache` on any device; the CPU's `EngineCache` is the reference."""

from __future__ import annotations

import numpy as np
import torch

from headrace_engine.connector.caches.device_cache import DeviceCache
from headrace_engine.connector.caches.engine_cache import EngineCache
from headrace_kvstore.blocks.block_layout import BlockLayout
from headrace_kvstore.blocks.sharding import WHOLE_LAYER, Shard


def check_against_host(
    caches: dict[str, torch.Tensor],
    blocks: int,
    device: str,
    held: Shard = WHOLE_LAYER,
    groups: dict[str, int] | None = None,
) -> None:
    """Save from and load to `device`, some blocks at a time, and compare with the same on the host.

    Args:
        caches: on the CPU, strided as on the device.
        blocks: the scheduler's block count.
        held: which parts of each stored layer they hold.
        groups: number of each layer's cache group, 0 or 1; None if there is one group.
    """
    for tensor in caches.values():
        _bytes(tensor).copy_(torch.randint(0, 255, _bytes(tensor).shape, dtype=torch.uint8))
    theirs = _moved(caches, device)
    host_layout = BlockLayout.of_tensors(caches, blocks, held, groups)
    layout = BlockLayout.of_tensors(theirs, blocks, held, groups)
    host = EngineCache(host_layout)
    cache = DeviceCache(theirs, layout, staging_bytes=2 * layout.layer_bytes)
    cache.warm()
    parts = len(caches) * held.count
    ends, two = np.array([blocks - 1, 0]), np.zeros((2, parts), np.uint64)
    assert (cache.sums(ends, two) == host.sums(ends, two)).all()
    assert (cache.layer_names, layout.layers[0].axes) == (
        host.layer_names,
        host_layout.layers[0].axes,
    )

    ids, order = np.array([3, 0, 4, 1, 5]), np.array([1, 5, 0, 3, 4])
    if groups is not None:  # both without block 2
        ids, order = np.stack([ids, order], 1), np.stack([order, ids], 1)
    seeds = np.arange(len(ids) * parts, dtype=np.uint64).reshape(len(ids), parts)
    wanted, payloads = _payloads(host_layout, len(ids))
    sums = host.save(ids, payloads, seeds)
    found, addresses = _payloads(layout, len(ids))
    cache.fence()
    assert (cache.save(ids, addresses, seeds) == sums).all()
    assert (found == wanted).all()
    mine = [slice(layer * held.count, (layer + 1) * held.count) for layer in range(len(caches))]

    # As whole numbers: random bytes hold NaNs, which equal nothing.
    before = {name: tensor.clone().view(torch.int16) for name, tensor in theirs.items()}
    # Each payload goes into another block than it came from.
    under_way = [
        cache.start(layer, rows, addresses, seeds[:, columns])
        for (layer, columns), group in zip(enumerate(mine), layout.groups, strict=True)
        for rows in [order if groups is None else order[:, group]]
    ]
    for columns, there in zip(mine, under_way, strict=True):
        assert (there() == sums[:, columns]).all()
    again, back = _payloads(layout, len(ids))
    cache.save(order, back, seeds)
    assert (again == wanted).all()
    kernel = next(iter(theirs.values())).shape[0] // blocks
    for name, tensor in theirs.items():
        untouched = slice(2 * kernel, 3 * kernel)
        assert torch.equal(tensor.view(torch.int16)[untouched], before[name][untouched])


def _payloads(layout: BlockLayout, count: int) -> tuple[np.ndarray, np.ndarray]:
    memory = np.zeros((count, layout.payload_bytes), np.uint8)
    steps = np.arange(count, dtype=np.uint64) * np.uint64(layout.payload_bytes)
    starts = memory.ctypes.data + steps
    return memory, starts


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return torch.tensor([], dtype=torch.uint8).set_(tensor.untyped_storage())


def _moved(caches: dict[str, torch.Tensor], device: str) -> dict[str, torch.Tensor]:
    """The caches on a device; those that share one storage there do so here."""
    storages: dict[int, torch.Tensor] = {}
    moved = {}
    for name, tensor in caches.items():
        key = tensor.untyped_storage().data_ptr()
        if key not in storages:
            storages[key] = _bytes(tensor).to(device, copy=True)
        base = storages[key].view(tensor.dtype)
        moved[name] = base.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
    return moved
