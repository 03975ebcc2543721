"""Reads what the NVIDIA driver shows to this container. Makes no CUDA context and holds no GPU."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from headrace.cli.probes.child import in_process

# Asks the library that CUDA programs load; this call needs no GPU and makes no context.
CUDA = """
import ctypes
number = ctypes.c_int()
status = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(number))
assert status == 0, f"cuDriverGetVersion: status {status}"
print(f"FOUND {number.value}")
"""
QUERY = "--query-gpu=name,memory.used,memory.total"


@dataclass(frozen=True)
class Gpu:
    """One GPU, or one MIG instance's parent, as nvidia-smi lists it."""

    name: str
    used_bytes: int
    total_bytes: int


@dataclass(frozen=True)
class Driver:
    """The driver.

    Attributes:
        version: of the kernel module, such as 580.95.05; None if there is none.
        cuda: newest CUDA that libcuda.so.1 speaks, (major, minor); None if it cannot be loaded.
        error: why `cuda` is None.
    """

    version: str | None
    cuda: tuple[int, int] | None
    error: str


def nvidia_smi() -> tuple[list[Gpu], str]:
    """Return (GPUs, ""), or ([], why nvidia-smi lists none)."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return [], "there is no nvidia-smi"
    try:
        listing = subprocess.run(
            [program, QUERY, "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
    except (OSError, subprocess.SubprocessError) as error:
        return [], f"nvidia-smi: {error}"
    if listing.returncode != 0:
        words = (listing.stdout + listing.stderr).split()
        return [], f"nvidia-smi: {' '.join(words)[:200] or f'exit status {listing.returncode}'}"
    return parse_listing(listing.stdout), ""


def parse_listing(text: str) -> list[Gpu]:
    """Parse lines of `name, MiB used, MiB in total`; missing sizes ("[N/A]") count as 0."""
    found = []
    for line in text.splitlines():
        name, *sizes = (part.strip() for part in line.rsplit(",", 2))
        if not name:
            continue
        used, total = ([int(s) * 2**20 if s.isdigit() else 0 for s in sizes] + [0, 0])[:2]
        found.append(Gpu(name, used, total))
    return found


def gpu_nodes(dev: Path = Path("/dev")) -> list[str]:
    """Return the device files of GPUs in this container, such as nvidia0."""
    return sorted(f.name for f in dev.glob("nvidia*") if re.fullmatch(r"nvidia\d+", f.name))


def gds_driver(modules: Path = Path("/sys/module")) -> bool:
    """Whether GPUDirect Storage's kernel module is loaded."""
    return (modules / "nvidia_fs").is_dir()


def cuda_driver() -> Driver:
    """Return the driver that this container sees."""
    version = driver_version()
    number, error = in_process(CUDA, timeout_s=30)
    cuda = (int(number) // 1000, int(number) % 1000 // 10) if number is not None else None
    return Driver(version, cuda, error)


def driver_version(file: Path = Path("/proc/driver/nvidia/version")) -> str | None:
    """Return the version of the kernel module; None if it is not loaded."""
    try:
        match = re.search(r"\b(\d{3,}\.\d+(\.\d+)?)\b", file.read_text("utf-8", errors="replace"))
    except OSError:
        return None
    return match.group(1) if match else None


def torch_cuda() -> str | None:
    """Return the CUDA version for which torch was built, such as 13.0; None for a CPU build or no
    torch.

    Read from torch's own file: importing it takes seconds.
    """
    try:
        spec = find_spec("torch")
        if spec is None or not spec.submodule_search_locations:
            return None
        source = (Path(spec.submodule_search_locations[0]) / "version.py").read_text("utf-8")
    except (OSError, ValueError):
        return None
    match = re.search(r"^cuda\b[^=\n]*=\s*['\"]([\d.]+)['\"]", source, re.MULTILINE)
    return match.group(1) if match else None
