"""Placement of a GPU's worker near its GPU, and of an arena near the GPUs.

`topology` decides, and this file asks the kernel. If the kernel refuses (containers without
SYS_NICE may set no memory policy), this file logs it and leaves the placement as it is. Memory
policies are preferences: a full node costs speed, not the process.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import platform
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from headrace_kvstore.device import topology

logger = logging.getLogger("headrace.kvstore")

NET_DEVICES = "UCX_NET_DEVICES"
PREFERRED, INTERLEAVED = 1, 3
"""Memory policies (linux/mempolicy.h)."""
_CALLS = {
    "x86_64": {"mbind": 237, "set_mempolicy": 238, "get_mempolicy": 239},
    "aarch64": {"mbind": 235, "get_mempolicy": 236, "set_mempolicy": 237},
}
_MASK_WORDS = 16
_BUS_ID_BYTES = 32

_own_policy: list[int] = []
"""This process's memory policy, if `apply` has set one."""

_libc = ctypes.CDLL(None, use_errno=True)


@cache
def place_worker(device: int) -> topology.Placement:
    """Place this process, the worker of a CUDA device, once; return the placement.

    Call it before NIXL makes its agent, which reads UCX_NET_DEVICES.
    """
    bus_id = pci_address(device)
    machine = topology.read()
    allowed = os.sched_getaffinity(0)
    found = topology.place(machine, bus_id, allowed, os.environ.get(NET_DEVICES))
    apply(found)
    logger.info("the worker of GPU %s: %s", bus_id, describe(found))
    return found


def pci_address(device: int, driver: Any = None) -> str:
    """Return the PCI address of a CUDA device, by its number in this process; a MIG instance has
    its card's. Empty if the driver does not report one.

    Args:
        driver: CUDA's library; None for libcuda.so.1.
    """
    try:
        driver = driver or ctypes.CDLL("libcuda.so.1")
        text = ctypes.create_string_buffer(_BUS_ID_BYTES)
        status = driver.cuDeviceGetPCIBusId(text, _BUS_ID_BYTES, device)
    except (AttributeError, OSError):
        return ""
    return text.value.decode() if status == 0 else ""


def apply(placement: topology.Placement) -> None:
    """Apply a placement: the processors to all threads of this process and those that they start,
    the memory node to the calling thread and those that it starts."""
    if placement.net_devices:
        os.environ[NET_DEVICES] = placement.net_devices
    if not placement.cpus:
        return
    for thread in os.listdir("/proc/self/task"):
        try:
            os.sched_setaffinity(int(thread), placement.cpus)
        except OSError as error:
            logger.warning("a worker cannot be bound to its GPU's processors: %s", error)
            return
    if placement.node is not None and not somebody_has_chosen():
        _told("set_mempolicy", PREFERRED, *_mask([placement.node]))
        _own_policy.append(_policy())


def spread(memory: mmap.mmap, folder: Path, nodes: Sequence[int] | None = None) -> str:
    """Place the pages of a shared file, none of which is allocated yet, on the nodes of the GPUs.

    Args:
        folder: of the file. Nothing is done if it is mounted with a policy (`mpol=`), or if this
            process has one: the operator has chosen.
        nodes: None for those that `topology` finds.

    Returns:
        The placement in words; empty if nothing was changed.
    """
    nodes = topology.read().arena_nodes() if nodes is None else nodes
    if not nodes or somebody_has_chosen() or mounted_with_policy(folder):
        return ""
    held = ctypes.c_char.from_buffer(memory)
    try:
        address, size = ctypes.c_void_p(ctypes.addressof(held)), ctypes.c_ulong(len(memory))
        mode = INTERLEAVED if len(nodes) > 1 else PREFERRED
        if not _told("mbind", address, size, mode, *_mask(nodes), 0):
            return ""
    finally:
        del held  # or the mapping could not be closed
    return describe_nodes(nodes)


def somebody_has_chosen() -> bool:
    """Whether this thread has a memory policy other than that of `apply`, or the kernel reports
    none."""
    return _policy() not in (0, *_own_policy)


def mounted_with_policy(folder: Path, mounts: Path = Path("/proc/self/mounts")) -> bool:
    """Whether a tmpfs there has a memory policy of its own."""
    try:
        lines = [line.split() for line in mounts.read_text().splitlines()]
    except OSError:
        return False
    real = str(folder.resolve())
    holding = [line for line in lines if len(line) > 3 and Path(real).is_relative_to(line[1])]
    nearest = max(holding, key=lambda line: len(line[1]), default=None)
    return nearest is not None and "mpol=" in nearest[3]


def describe_nodes(nodes: Sequence[int]) -> str:
    """Describe nodes for people."""
    if len(nodes) == 1:
        return f"on NUMA node {nodes[0]}"
    return f"interleaved over NUMA nodes {', '.join(map(str, nodes))}" if nodes else ""


def describe(placement: topology.Placement) -> str:
    """Describe a placement for people."""
    parts = []
    if placement.node is not None:
        parts.append(f"on the processors and memory of NUMA node {placement.node}")
    if placement.net_devices:
        parts.append(f"{NET_DEVICES}={placement.net_devices}")
    return ", ".join(parts) or "stays where it is"


def _policy() -> int:
    """Return this thread's memory policy: 0 for none, below 0 if the kernel does not report it."""
    mode, mask = ctypes.c_int(-1), (ctypes.c_ulong * _MASK_WORDS)()
    bits = ctypes.c_ulong(64 * _MASK_WORDS)
    done = _call("get_mempolicy", ctypes.byref(mode), mask, bits, None, 0)
    return mode.value if done == 0 else -1


def _told(name: str, *arguments: Any) -> bool:
    if _call(name, *arguments) == 0:
        return True
    why = os.strerror(ctypes.get_errno())
    logger.warning("%s: %s; memory lies where the kernel puts it (docs/gpu.md)", name, why)
    return False


def _call(name: str, *arguments: Any) -> int:
    number = _CALLS.get(platform.machine(), {}).get(name)
    if number is None:
        return -1
    return int(_libc.syscall(ctypes.c_long(number), *arguments))


def _mask(nodes: Sequence[int]) -> tuple[Any, Any]:
    mask = (ctypes.c_ulong * _MASK_WORDS)()
    for node in nodes:
        mask[node // 64] |= 1 << node % 64
    return mask, ctypes.c_ulong(64 * _MASK_WORDS)
