"""Trees of files as the kernel shows a machine's devices."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from headrace_kvstore.device.topology import NVIDIA, Roots


@dataclass
class Machine:
    """A machine under a folder; empty at first."""

    folder: Path
    minors: int = 0
    uverbs: int = 0
    roots: Roots = field(init=False)

    def __post_init__(self) -> None:
        self.roots = Roots(*(self.folder / name for name in ("sys", "proc", "dev")))

    def node(self, number: int, cpus: str) -> None:
        """A NUMA node."""
        self._write(self.roots.sys / f"devices/system/node/node{number}/cpulist", cpus)

    def gpu(self, path: str, node: int, mine: bool = True, instances: int = 0) -> None:
        """A GPU of NVIDIA's.

        Args:
            path: of its PCI devices, from the host bridge to its own.
            mine: whether this container may use it.
            instances: MIG's.
        """
        minor, self.minors = self.minors, self.minors + 1
        bus_id = self._device(path, node, NVIDIA, "0x030200")
        driver = self.roots.proc / "driver/nvidia"
        told = f"Model: \t\t NVIDIA H100\nDevice Minor: \t {minor}\n"
        self._write(driver / f"gpus/{bus_id}/information", told)
        if mine:
            self._write(self.roots.dev / f"nvidia{minor}", "")
        for number in range(instances):
            self._write(driver / f"capabilities/gpu{minor}/mig/gi{number + 1}/ci0/access", "")

    def nic(
        self, name: str, path: str, node: int, state: str = "4: ACTIVE", mine: bool = True
    ) -> None:
        """An RDMA device with one port."""
        bus_id = self._device(path, node, "0x15b3", "0x020700")
        folder = self.roots.sys / "class/infiniband" / name
        self._write(folder / "ports/1/state", state)
        (folder / "device").symlink_to(self.roots.sys / "bus/pci/devices" / bus_id)
        verbs, self.uverbs = f"uverbs{self.uverbs}", self.uverbs + 1
        self._write(self.roots.sys / f"class/infiniband_verbs/{verbs}/ibdev", name)
        if mine:
            self._write(self.roots.dev / "infiniband" / verbs, "")

    def _device(self, path: str, node: int, vendor: str, kind: str) -> str:
        real = self.roots.sys / "devices" / path
        for name, text in (("vendor", vendor), ("class", kind), ("numa_node", str(node))):
            self._write(real / name, text)
        link = self.roots.sys / "bus/pci/devices" / real.name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(real)
        return real.name

    def _write(self, file: Path, text: str) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")


def dgx_h100(folder: Path) -> Machine:
    """8 GPUs and as many cards, each pair below a switch; 2 sockets; 2 cards for storage."""
    made = Machine(folder)
    made.node(0, "0-55,112-167")
    made.node(1, "56-111,168-223")
    for n in range(8):
        root, bus = f"pci0000:{16 * n + 1:02x}", 16 * n + 2
        switch = f"{root}/0000:{16 * n + 1:02x}:01.0/0000:{bus:02x}:00.0"
        made.gpu(f"{switch}/0000:{bus + 1:02x}:00.0/0000:{bus + 2:02x}:00.0", n // 4)
        made.nic(f"mlx5_{n}", f"{switch}/0000:{bus + 1:02x}:01.0/0000:{bus + 3:02x}:00.0", n // 4)
    for n in range(2):
        made.nic(f"mlx5_{8 + n}", f"pci0000:f{n}/0000:f{n}:01.0/0000:f{n + 2}:00.0", n)
    return made


def gh200(folder: Path) -> Machine:
    """One GPU whose memory is a node without processors, and two cards at other bridges."""
    made = Machine(folder)
    made.node(0, "0-71")
    for node in range(1, 9):
        made.node(node, "")
    made.gpu("pci0009:00/0009:00:00.0/0009:01:00.0", 0)
    for n in range(2):
        made.nic(f"mlx5_{n}", f"pci000{n}:00/000{n}:00:00.0/000{n}:01:00.{n}", 0)
    return made


def laptop(folder: Path) -> Machine:
    """One node, no GPU, no card."""
    made = Machine(folder)
    made.node(0, "0-7")
    return made
