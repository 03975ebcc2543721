"""The processors, memory node and network cards nearest to each GPU, from sysfs.

    a GPU's worker       runs on the processors of its GPU's NUMA node, and takes memory from there
                         first, unless the process is bound already
    its RDMA device      the active ones that share the most PCI bridges with the GPU: on a DGX H100
                         the one below the same switch. None is named if they share no more than
                         the processor's socket: UCX then knows as much
    a machine's arena    all on one node if all GPUs are there, else its pages are interleaved over
                         the GPUs' nodes, so that each GPU reads at the same speed
    a MIG instance       is where its card is

Nothing is decided on a machine without GPUs, with one NUMA node, or if the firmware does not report
a GPU's node. Only devices and processors that a container may use count. Sources: Linux's
Documentation/ABI (sysfs-bus-pci, sysfs-devices-node, sysfs-class-infiniband). Pure: reads files
below the roots that it is given.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

NVIDIA, DISPLAYS = "0x10de", ("0x0300", "0x0302")
"""PCI vendor, and the classes of its GPUs."""
ACTIVE = "4:"
"""Beginning of the state of an active port."""


@dataclass(frozen=True, slots=True)
class Roots:
    """Folders of the kernel's files."""

    sys: Path = Path("/sys")
    proc: Path = Path("/proc")
    dev: Path = Path("/dev")


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU.

    Attributes:
        bus_id: such as 0000:1b:00.0.
        node: NUMA node with processors; -1 if that is not known.
        bridges: PCI devices above it, the host's bridge first.
        instances: number of MIG instances; 0 if MIG is not in use.
    """

    bus_id: str
    node: int
    bridges: tuple[str, ...]
    instances: int = 0


@dataclass(frozen=True, slots=True)
class Nic:
    """An RDMA device with its first active port. The rest as `Gpu`."""

    name: str
    port: int
    node: int
    bridges: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Topology:
    """A machine, as far as this process may use it.

    Attributes:
        cpus: processors of each NUMA node that has any.
        gpus, nics: in the order of their addresses, of their names.
    """

    cpus: dict[int, frozenset[int]]
    gpus: tuple[Gpu, ...]
    nics: tuple[Nic, ...]

    def gpu(self, bus_id: str) -> Gpu | None:
        """Return the GPU of that PCI address, in any spelling."""
        wanted = normal(bus_id)
        return next((gpu for gpu in self.gpus if gpu.bus_id == wanted), None)

    def nearest(self, gpu: Gpu) -> tuple[Nic, ...]:
        """Return the RDMA devices that share the most bridges with a GPU; none if that is only the
        host's."""
        shared = {nic: _common(nic.bridges, gpu.bridges) for nic in self.nics}
        most = max(shared.values(), default=0)
        return tuple(nic for nic, count in shared.items() if count == most > 1)

    def arena_nodes(self) -> tuple[int, ...]:
        """Return the NUMA nodes for the arena; none if it does not matter or nothing is known."""
        nodes = {gpu.node for gpu in self.gpus}
        return tuple(sorted(nodes)) if len(self.cpus) > 1 and nodes and -1 not in nodes else ()


@dataclass(frozen=True, slots=True)
class Placement:
    """Placement of a GPU's worker; an empty value or None changes nothing.

    Attributes:
        cpus: processors.
        node: memory to take first.
        net_devices: for UCX_NET_DEVICES.
    """

    cpus: frozenset[int] = frozenset()
    node: int | None = None
    net_devices: str = ""


def place(
    machine: Topology, bus_id: str, allowed: Collection[int], net_devices: str | None
) -> Placement:
    """Choose the placement of a GPU's worker.

    Args:
        bus_id: of its GPU.
        allowed: processors that the process may use now. If they are fewer than all, the process is
            bound already.
        net_devices: UCX_NET_DEVICES, None if it is not set.
    """
    gpu = machine.gpu(bus_id)
    if gpu is None:
        return Placement()
    nearest = [f"{nic.name}:{nic.port}" for nic in machine.nearest(gpu)]
    found = ",".join(nearest) if net_devices is None else ""
    everything = frozenset().union(*machine.cpus.values())
    free = len(machine.cpus) > 1 and everything <= set(allowed)
    if not free or gpu.node not in machine.cpus:
        return Placement(net_devices=found)
    return Placement(machine.cpus[gpu.node], gpu.node, found)


def read(roots: Roots = Roots()) -> Topology:
    """Read the machine's topology. Entries that cannot be read are left out."""
    cpus = {}
    for folder in (roots.sys / "devices/system/node").glob("node[0-9]*"):
        found = cpu_list(_text(folder / "cpulist"))
        if found:  # a GH200's GPU memory is a node without processors
            cpus[int(folder.name.removeprefix("node"))] = found
    return Topology(cpus, tuple(_gpus(roots, cpus)), tuple(_nics(roots, cpus)))


def cpu_list(text: str) -> frozenset[int]:
    """Parse a list of the kernel, such as 0-3,8. Empty for text that is no list."""
    found: set[int] = set()
    try:
        for part in filter(None, text.split(",")):
            first, _, last = part.partition("-")
            found.update(range(int(first), int(last or first) + 1))
    except ValueError:
        return frozenset()
    return frozenset(found)


def normal(bus_id: str) -> str:
    """Return a PCI address as sysfs writes it: NVIDIA's have 8 digits of the domain, and
    capitals."""
    domain, _, rest = bus_id.lower().rpartition(":")[0].rpartition(":")
    return f"{domain[-4:] or '0000'}:{rest}:{bus_id.lower().rpartition(':')[2]}"


def _gpus(roots: Roots, cpus: Collection[int]) -> list[Gpu]:
    found = []
    driver = roots.proc / "driver/nvidia"
    for folder in sorted((roots.sys / "bus/pci/devices").glob("*")):
        if _text(folder / "vendor") != NVIDIA or _text(folder / "class")[:6] not in DISPLAYS:
            continue
        minor = _minor(driver / "gpus" / folder.name / "information")
        if minor is None or not (roots.dev / f"nvidia{minor}").exists():
            continue  # no driver, or another container's
        instances = len(list((driver / f"capabilities/gpu{minor}/mig").glob("gi*/ci*")))
        place = _node(folder, cpus), _bridges(folder)
        found.append(Gpu(folder.name, *place, instances))
    return found


def _nics(roots: Roots, cpus: Collection[int]) -> list[Nic]:
    usable = {
        _text(each / "ibdev")
        for each in (roots.sys / "class/infiniband_verbs").glob("uverbs*")
        if (roots.dev / "infiniband" / each.name).exists()
    }
    found = []
    for folder in sorted((roots.sys / "class/infiniband").glob("*")):
        ports = sorted((folder / "ports").glob("*"), key=lambda port: port.name)
        active = [int(port.name) for port in ports if _text(port / "state").startswith(ACTIVE)]
        if folder.name in usable and active:
            device = folder / "device"
            found.append(Nic(folder.name, active[0], _node(device, cpus), _bridges(device)))
    return found


def _node(device: Path, cpus: Collection[int]) -> int:
    with suppress(ValueError):
        node = int(_text(device / "numa_node"))
        if node in cpus:
            return node
    return -1


def _bridges(device: Path) -> tuple[str, ...]:
    """Return the bridges above a device, host bridge first."""
    parts = Path(os.path.realpath(device)).parts
    first = next((i for i, part in enumerate(parts) if part.startswith("pci")), len(parts))
    return parts[first:-1]


def _common(one: Sequence[str], other: Sequence[str]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def _minor(information: Path) -> int | None:
    for line in _text(information).splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "Device Minor" and value.strip().isdecimal():
            return int(value)
    return None


def _text(file: Path) -> str:
    try:
        return file.read_text("utf-8", errors="replace").strip()
    except OSError:
        return ""
