"""Start and stop a private Ray node with its own ports, its own folder and its own session.

Ray's default ports and folder are not used, so several instances, and other Ray clusters, can share
a machine. `start` returns when the supervisor runs. `wait` returns when Ray answers. `stop` leaves
no process, no folder and no file in /dev/shm.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from headrace.cli.process_matcher import ProcessMatcher, terminate
from headrace.cli.supervisor import RECORD_FILE
from headrace.config.schema import MAX_TEMP_DIR_CHARS
from headrace.forkserver import listen
from headrace.forkserver.launcher import ADDRESS_VARIABLE
from headrace.observability.shared_memory import (
    TOKEN_VARIABLE,
    ProcessId,
    ShmFile,
    remove_shm,
    shm_names,
)
from headrace_kvstore.protocol.address import family

HOST = "127.0.0.1"
# Ray replaces 127.0.0.1 by the machine's external address, but keeps other loopback addresses. With
# one of those, the node survives a change of network. (Ray's gRPC servers listen on all interfaces
# in any case; the node's token protects them, see `auth_environment`.)
NODE_HOST = "127.0.0.2"
FIRST_PORT, LAST_PORT = 11_000, 30_000
given_ports: set[int] = set()  # by this process: one may be listened on only minutes later
SUPERVISOR_GRACE_S = 25.0  # to end Ray (5 s), remaining processes (1 s + 10 s), and clean up
NOISY_ENVIRONMENT = (
    "RAY_ADDRESS",  # would connect to another cluster
    "RAY_TMPDIR",
    "VLLM_CPU_KVCACHE_SPACE",  # would override kv_cache_gb
)


class NodeError(RuntimeError):
    """The node did not start; the text gives the reason."""


@dataclass(frozen=True)
class NodeSpec:
    """Settings of a node to start."""

    name: str
    num_cpus: int
    object_store_bytes: int
    token: str = field(default_factory=lambda: secrets.token_hex(8))
    dashboard: bool = True
    dashboard_port: int | None = None  # None: a free one
    temp_root: str | None = None  # None: the system's
    environment: Mapping[str, str] = field(default_factory=dict)
    fork_server: bool = False  # processes start as forks of one that has imported vLLM
    foreground: bool = True  # the node ends when this process does


@dataclass(frozen=True)
class Node:
    """A node that was started. It may not answer yet."""

    address: str  # host:port of the GCS
    temp_dir: Path
    dashboard_url: str | None
    supervisor: ProcessId
    token: str
    shm_before: frozenset[str]
    environment: Mapping[str, str]  # with which a driver of this node's starts

    def matcher(self) -> ProcessMatcher:
        """Return the marks by which its processes are found."""
        return ProcessMatcher(self.token, self.temp_dir, [self.supervisor], self.shm_before)


def free_ports(count: int) -> list[int]:
    """Return ports on which nothing listens now, chosen at random. No two calls return the same.

    They lie below the kernel's range of ephemeral ports: the kernel may give one of those to
    another process before it is used.

    Raises:
        NodeError: there are not that many.
    """
    used = given_ports | {c.laddr.port for c in psutil.net_connections("inet") if c.laddr}
    candidates = list(range(FIRST_PORT, LAST_PORT))
    secrets.SystemRandom().shuffle(candidates)
    ports: list[int] = []
    for port in candidates:
        if port not in used and port_is_free("0.0.0.0", port):
            ports.append(port)
            if len(ports) == count:
                given_ports.update(ports)
                return ports
    raise NodeError(f"{count} free ports between {FIRST_PORT} and {LAST_PORT} were not found")


def port_is_free(host: str, port: int) -> bool:
    """Whether `host:port` can be listened on now."""
    with socket.socket(family(host)) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def make_temp_dir(name: str, root: str | None = None) -> Path:
    """Make a private folder with a short path, because Ray's Unix sockets lie deep in it."""
    root = root or tempfile.gettempdir()
    if len(root) > MAX_TEMP_DIR_CHARS:
        root = "/tmp"
    return Path(tempfile.mkdtemp(prefix=f"hr-{name[:6]}-", dir=root))


def auth_environment(temp_dir: Path) -> dict[str, str]:
    """Return the environment with which Ray requires the node's token, and a driver presents it.

    Without a token, any program that reaches one of Ray's ports could run code here. The token is a
    file in the node's folder, created if missing. A driver needs this environment before it imports
    Ray.
    """
    file = temp_dir / "ray-token"
    if not file.exists():
        with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as out:
            out.write(secrets.token_hex(32))
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(file)}


def start(spec: NodeSpec, temp_dir: Path | None = None) -> Node:
    """Start the node's supervisor, which starts Ray. Returns at once; see `wait`."""
    temp_dir = temp_dir or make_temp_dir(spec.name, spec.temp_root)
    gcs, dashboard, metrics, client, agent, agent_grpc, env_agent = free_ports(7)
    dashboard = spec.dashboard_port or dashboard
    command = [
        *(
            sys.executable,
            "-c",
            "import sys; from ray.scripts.scripts import main; sys.exit(main())",
        ),
        *("start", "--head", "--block", "--disable-usage-stats", "--log-style=record"),
        *(f"--node-ip-address={NODE_HOST}", f"--port={gcs}", f"--temp-dir={temp_dir / 'r'}"),
        *(f"--num-cpus={spec.num_cpus}", f"--object-store-memory={spec.object_store_bytes}"),
        *(f"--include-dashboard={str(spec.dashboard).lower()}", f"--dashboard-host={HOST}"),
        "--include-log-monitor=false",  # it copies all logs to drivers that ask; ours do not
        *(f"--dashboard-port={dashboard}", f"--metrics-export-port={metrics}"),
        *(f"--ray-client-server-port={client}", f"--dashboard-agent-listen-port={agent}"),
        *(f"--dashboard-agent-grpc-port={agent_grpc}", f"--runtime-env-agent-port={env_agent}"),
        *("--min-worker-port=0", "--max-worker-port=0"),
    ]
    environment = {k: v for k, v in os.environ.items() if k not in NOISY_ENVIRONMENT}
    # Ray's default, 15, is for nodes where no answer waits for a worker. With it an engine
    # has twelve times the share of a process that runs when idle; with 0, three hundred times.
    environment.setdefault("RAY_worker_niceness", "0")
    # `uv run headrace up` would otherwise build a fresh environment for every worker.
    environment["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = "0"
    # A killed engine leaves its sockets: here they go with the node.
    environment.setdefault("VLLM_RPC_BASE_PATH", str(temp_dir))
    for_drivers = {**spec.environment, **auth_environment(temp_dir), "PYTHONHASHSEED": "0"}
    listener = None
    if spec.fork_server:
        for_drivers[ADDRESS_VARIABLE] = f"headrace-{secrets.token_hex(16)}"
        listener = listen(for_drivers[ADDRESS_VARIABLE])
    environment |= {**for_drivers, TOKEN_VARIABLE: spec.token}
    before = shm_names()
    parent = ProcessId.of(psutil.Process()) if spec.foreground else None
    instructions = {
        "name": spec.name,
        "command": command,
        "temp_dir": str(temp_dir),
        "token": spec.token,
        "shm_before": sorted(before),
        "parent": {"pid": parent.pid, "created": parent.created} if parent else None,
        "listener": listener.fileno() if listener else None,
    }
    (temp_dir / "supervisor.json").write_text(json.dumps(instructions))
    with open(temp_dir / "supervisor.log", "ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "headrace.cli.supervisor", str(temp_dir / "supervisor.json")],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=[listener.fileno()] if listener else [],
            start_new_session=True,
        )
    if listener is not None:
        listener.close()
    return Node(
        address=f"{NODE_HOST}:{gcs}",
        temp_dir=temp_dir,
        dashboard_url=f"http://{HOST}:{dashboard}" if spec.dashboard else None,
        supervisor=ProcessId.of(psutil.Process(process.pid)),
        token=spec.token,
        shm_before=before,
        environment=for_drivers,
    )


def wait(node: Node, timeout_s: float = 180.0) -> None:
    """Wait until Ray runs.

    Raises:
        NodeError: it ended or did not start in time; with the last lines of its log.
    """
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if "Ray runtime started" in _log(node):
            return
        if node.supervisor.process() is None:
            raise NodeError(f"Ray ended while starting: {_last_words(node)}")
        time.sleep(0.1)
    raise NodeError(f"Ray did not start within {timeout_s:g} s: {_last_words(node)}")


def ensure(node: Node, spec: NodeSpec, timeout_s: float = 180.0) -> Node:
    """Wait until Ray runs, and start it a second time if it fails.

    It fails if another process has taken a port, or if Ray's processes need more than Ray's limit
    of 30 s on a busy machine. The second node has the same folder but other ports.

    Raises:
        NodeError: it failed twice, or no time is left for a second try.
    """
    deadline = time.monotonic() + timeout_s
    try:
        wait(node, timeout_s)
        return node
    except NodeError:
        if time.monotonic() > deadline - 1.0:
            raise
    stop(node.matcher())
    node.temp_dir.mkdir(mode=0o700)
    again = start(spec, node.temp_dir)
    wait(again, max(1.0, deadline - time.monotonic()))
    return again


def stop(matcher: ProcessMatcher, keep_logs: Path | None = None) -> None:
    """End all processes, then remove the folder and the files in /dev/shm. Idempotent.

    Args:
        matcher: of the node, or of an instance from its state file.
        keep_logs: folder that Ray's logs are copied to first; its contents are replaced.
    """
    shm = matcher.shm_files(matcher.processes().values())
    for supervisor in matcher.pids:
        process = supervisor.process()
        if process is not None:
            with contextlib.suppress(psutil.Error):
                process.send_signal(signal.SIGTERM)
            _wait_gone(supervisor, SUPERVISOR_GRACE_S)
    shm |= terminate(matcher, grace_s=3.0)
    with contextlib.suppress(OSError, ValueError, TypeError):
        record = json.loads((matcher.temp_dir / RECORD_FILE).read_text())
        shm |= {ShmFile(*each) for each in record}
    remove_shm(shm, matcher.shm_before)
    if matcher.temp_dir.name.startswith("hr-"):
        if keep_logs is not None:
            save_logs(matcher.temp_dir, keep_logs)
        shutil.rmtree(matcher.temp_dir, ignore_errors=True)


def save_logs(temp_dir: Path, folder: Path) -> None:
    """Copy the logs of Ray and Serve to `folder`, replacing its contents."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    for log in temp_dir.glob("*.log"):
        with contextlib.suppress(OSError):
            shutil.copy(log, folder / log.name)
    for logs in temp_dir.glob("r/session_2*/logs"):
        with contextlib.suppress(OSError, shutil.Error):
            shutil.copytree(logs, folder, dirs_exist_ok=True, symlinks=True)
    folder.chmod(0o700)  # copytree copied the mode of Ray's folder, which all may write


def _wait_gone(identity: ProcessId, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while identity.process() is not None and time.monotonic() < deadline:
        with contextlib.suppress(ChildProcessError, OSError):
            os.waitpid(identity.pid, os.WNOHANG)  # if it is our own child
        time.sleep(0.05)


def _log(node: Node) -> str:
    with contextlib.suppress(OSError):
        return (node.temp_dir / "ray.log").read_text("utf-8", errors="replace")
    return ""


def _last_words(node: Node) -> str:
    text = _log(node)
    with contextlib.suppress(OSError):
        text += (node.temp_dir / "supervisor.log").read_text("utf-8", errors="replace")
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line).strip() for line in text.splitlines()]
    lines = [line for line in lines if line]
    return " | ".join(lines[-3:]) or "it logged nothing"
