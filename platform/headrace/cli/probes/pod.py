"""Reads this container's limits, rights and user, and the folders that it can write."""

from __future__ import annotations

import os
import pwd
import resource
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

CAP_IPC_LOCK = 14  # linux/capability.h
CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class User:
    """A process's user. `name` is None if neither the environment nor /etc/passwd gives one."""

    uid: int
    name: str | None


def user(env: Mapping[str, str] = os.environ) -> User:
    """Return this process's user, by the rules of `getpass.getuser`, which `import torch` calls."""
    for variable in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        if env.get(variable):
            return User(os.getuid(), env[variable])
    try:
        return User(os.getuid(), pwd.getpwuid(os.getuid()).pw_name)
    except KeyError:
        return User(os.getuid(), None)


def memory_limit_bytes(cgroup: Path = CGROUP) -> int | None:
    """Return the container's memory limit (cgroup v2, else v1); None if there is none."""
    return _limit(cgroup / "memory.max", cgroup / "memory" / "memory.limit_in_bytes")


def pids_limit(cgroup: Path = CGROUP) -> int | None:
    """Return how many processes and threads the container may have; None if there is no limit."""
    return _limit(cgroup / "pids.max", cgroup / "pids" / "pids.max")


def _limit(*files: Path) -> int | None:
    for file in files:
        try:
            text = file.read_text().strip()
        except OSError:
            continue
        # v1 writes "no limit" as the largest multiple of a page.
        return int(text) if text.isdigit() and int(text) < 2**62 else None
    return None


def memlock_bytes() -> int | None:
    """Return the soft limit of locked memory; None if there is none."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def has_ipc_lock(status: Path = Path("/proc/self/status")) -> bool:
    """Whether the process has the capability IPC_LOCK, so that no limit of locked memory holds."""
    for line in status.read_text().splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> CAP_IPC_LOCK & 1)
    return False


def rdma_nodes(dev: Path = Path("/dev/infiniband")) -> list[str]:
    """Return the device files for RDMA in this container. (sysfs lists the whole machine's.)"""
    if not dev.is_dir():
        return []
    return sorted(f.name for f in dev.iterdir() if f.name.startswith("uverbs"))


def interfaces(folder: Path = Path("/sys/class/net")) -> list[str]:
    """Return the names of the network interfaces."""
    return sorted(f.name for f in folder.iterdir()) if folder.is_dir() else []


def needed_folders(env: Mapping[str, str] = os.environ) -> dict[str, Path]:
    """Return the folders that an engine or Ray writes to, by their variables."""
    home = Path(env.get("HOME") or "/")
    cache = Path(env.get("XDG_CACHE_HOME") or home / ".cache")
    tmp = Path(env.get("TMPDIR") or "/tmp")
    return {
        "TMPDIR": tmp,
        "HOME": home,
        "RAY_TMPDIR": Path(env.get("RAY_TMPDIR") or "/tmp"),
        "HF_HOME": Path(env.get("HF_HOME") or cache / "huggingface"),
        "VLLM_CACHE_ROOT": Path(env.get("VLLM_CACHE_ROOT") or cache / "vllm"),
        "TRITON_CACHE_DIR": Path(env.get("TRITON_CACHE_DIR") or home / ".triton"),
        "NUMBA_CACHE_DIR": Path(env.get("NUMBA_CACHE_DIR") or cache),
        "HEADRACE_CACHE": Path(env.get("HEADRACE_CACHE") or cache / "headrace"),
    }


def write_error(folder: Path) -> str:
    """Return why no file can be made in `folder`, or in its nearest parent if it does not exist; ""
    if one can. Leaves no file."""
    place = folder
    while not place.exists() and place != place.parent:
        place = place.parent
    try:
        with tempfile.TemporaryFile(prefix=".headrace-doctor-", dir=place) as file:
            file.write(b"x")
            file.flush()
    except OSError as error:
        return f"{place}: {error.strerror or error}"
    return ""


def ray_token(env: Mapping[str, str] = os.environ) -> tuple[str, str]:
    """Return (Ray's authentication mode, why there is no token or "").

    Ray looks for a token in RAY_AUTH_TOKEN, then in the file RAY_AUTH_TOKEN_PATH, then in
    ~/.ray/auth_token.
    """
    mode = env.get("RAY_AUTH_MODE", "disabled").lower()
    if env.get("RAY_AUTH_TOKEN", "").strip():
        return mode, ""
    named = env.get("RAY_AUTH_TOKEN_PATH")
    file = Path(named) if named else Path(env.get("HOME") or "/") / ".ray" / "auth_token"
    try:
        return mode, "" if file.read_text().strip() else f"{file} is empty"
    except (OSError, UnicodeDecodeError) as error:
        return mode, f"{file}: {getattr(error, 'strerror', None) or error}"
