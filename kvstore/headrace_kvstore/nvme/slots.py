"""Slots of a folder that several nodes of one machine share.

Pods of one machine mount one folder of it, and each has a node. A node owns one *slot*: the first
is the folder itself, the others are its subfolders "1", "2", ... A node takes a slot that exists
and is free, so a restarted node finds blocks of an earlier one. If all are owned it makes another
one, unless some belong to another app. Such an app is being replaced, and its blocks are worth
waiting for. So there are as many slots as nodes of one app ever ran there at once.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from headrace_kvstore.nvme.nvme_tier import LOCK, FolderBusy, NvmeTier

MAX_SLOTS = 64


def open_slot(folder: Path, owner: str, open_tier: Callable[[Path], NvmeTier]) -> NvmeTier:
    """Open the tier in a slot.

    Args:
        owner: name that all nodes of an app have, and no others.
        open_tier: `NvmeTier.open` of a slot's folder; writes `owner` into its lock.

    Raises:
        FolderBusy: another app owns a slot, which will become free; or all slots are owned.
    """
    waits: FolderBusy | None = None
    for number in range(MAX_SLOTS):
        slot = folder / str(number) if number else folder
        if number and waits and not (slot / LOCK).exists():
            break
        try:
            return open_tier(slot)
        except FolderBusy as error:
            if _owner(slot) != owner:
                waits = error
    raise waits or FolderBusy(f"{MAX_SLOTS} nodes of this app own {folder}")


def _owner(slot: Path) -> str:
    """Return the name that the slot's owner wrote; "" if it has not done so yet."""
    return (slot / LOCK).read_bytes()[:256].decode(errors="replace")
