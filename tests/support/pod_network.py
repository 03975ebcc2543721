"""Pods of a rendered release as processes: each has a network, a file system and processes of its
own, and joins the others by a bridge. What KubeRay adds to a pod (the command of Ray, variables) is
added here; what is outside of the release reaches only the ports that its policies allow.

    python -m tests.support.pod_network SOCKET HOST PORT

forwards connections of a Unix socket to a port.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx

from tests.support import run
from tests.support.app import until
from tests.support.chart_network import allowed
from tests.support.chart_objects import Object, groups, of_kind, quantity

OPERATOR = {"kubernetes.io/metadata.name": "kuberay-operator"}
CLIENTS = {"kubernetes.io/metadata.name": "shop"}
BRIDGE = "10.77.0.254"
READ_ONLY = "mount -o remount,bind,ro /"
KEPT = ("PATH", "PYTHONPATH", "LANG", run.MARK, run.STARTS)
"""Variables of this process that pods get."""
NO_RIGHTS = "setpriv --bounding-set=-all --inh-caps=-all --no-new-privs"
SETUP = ["unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "--uts"]


def can_make_networks() -> bool:
    """Whether this process may make namespaces and bridges."""
    script = "ip link add br0 type bridge && mount -t tmpfs tmpfs /mnt"
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        tried = [*SETUP, "sh", "-ec", script]
        return subprocess.run(tried, capture_output=True, timeout=30).returncode == 0
    return False


def ray_start(group: Object, head: str | None) -> list[str]:
    """The command that KubeRay makes of a group's `rayStartParams`, `resources` and limits.

    Args:
        head: address of the head; None for the head itself.
    """
    limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
    offered = dict(group.get("resources", {}))
    cpus = offered.pop("CPU", None) or str(-(-quantity(limits["cpu"]) // 1))
    gpus = offered.pop("GPU", None)
    params = {
        **group["rayStartParams"],
        "num-cpus": str(int(float(cpus))),
        "memory": str(int(quantity(limits["memory"]))),
        "metrics-export-port": "8080",
        "dashboard-agent-listen-port": "52365",
        "resources": json.dumps({name: float(count) for name, count in offered.items()}),
        **({"num-gpus": gpus} if gpus else {}),
    }
    first = ["--head"] if head is None else [f"--address={head}:6379"]
    return ["ray", "start", *first, "--block", *(f"--{k}={v}" for k, v in params.items())]


class Pod:
    """One pod: the main container of a group.

    Args:
        folder: of its writable files; `/tmp` in the pod.
        shared: folders that it sees in `/tmp`, by name.
    """

    def __init__(
        self,
        name: str,
        address: str,
        group: Object,
        command: list[str],
        folder: Path,
        env: dict[str, str],
        shared: dict[str, Path],
    ) -> None:
        self.name, self.address, self.group = name, address, group
        self.labels: dict[str, str] = group["template"]["metadata"]["labels"]
        spec = group["template"]["spec"]
        self.container: Object = spec["containers"][0]
        [shm] = [v["emptyDir"]["sizeLimit"] for v in spec["volumes"] if v["name"] == "shm"]
        (folder / "home").mkdir(parents=True)
        # As the kubelet writes it. There is no DNS, and nothing waits for one.
        (folder / "hosts").write_text(f"127.0.0.1 localhost\n{address} {name}\n")
        (folder / "resolv.conf").touch()
        script = [f"hostname {name}"]
        script += [f"mount --bind {folder}/{f} /etc/{f}" for f in ("hosts", "resolv.conf")]
        for known, source in shared.items():
            (folder / known).mkdir()
            script.append(f"mount --rbind {source} {folder / known}")
        script += [
            f"mount --rbind {folder} /tmp",
            f"mount -t tmpfs -o size={int(quantity(shm))} tmpfs /dev/shm",
            READ_ONLY,
            "cd /tmp",
            f"until ip -4 addr show eth0 2>&1 | grep -q {address}/; do sleep 0.1; done",
            f'exec {NO_RIGHTS} "$@"',
        ]
        own = {e["name"]: e["value"] for e in self.container["env"] if "value" in e}
        # Nothing else of this process: its variables name folders that the pod does not have.
        kept = {name: os.environ[name] for name in KEPT if name in os.environ}
        fixed = {"HOME": "/tmp/home", "TMPDIR": "/tmp", "POD_IP": address}
        if "numba" in shared:
            fixed["NUMBA_CACHE_DIR"] = "/tmp/numba"
        self._log = open(folder.with_suffix(".log"), "wb")  # noqa: SIM115
        self.process = subprocess.Popen(
            [*SETUP, "sh", "-ec", "; ".join(script), "sh", *command],
            env={**kept, **own, **env, **fixed},
            stdout=self._log,
            stderr=self._log,
        )
        self.log = folder.with_suffix(".log")
        self.folder = folder

    def run(self, command: list[str], timeout_s: float = 60.0) -> subprocess.CompletedProcess[str]:
        """Run a command in the pod, as `kubectl exec`."""
        [child] = (
            Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
            .read_text("utf-8")
            .split()
        )
        enter = ["nsenter", "--target", child, "--net", "--mount", "--pid", "--uts"]
        return subprocess.run([*enter, *command], capture_output=True, text=True, timeout=timeout_s)

    def is_ready(self) -> bool:
        """What the pod's readiness probe says."""
        probe = self.container["readinessProbe"]
        if "exec" in probe:
            return self.run(probe["exec"]["command"]).returncode == 0
        ports = {port["name"]: port["containerPort"] for port in self.container["ports"]}
        url = f"http://{self.address}:{ports[probe['httpGet']['port']]}{probe['httpGet']['path']}"
        ask = f"import urllib.request as r; r.urlopen({url!r}, timeout=5)"
        return self.run([os.path.realpath(sys.executable), "-c", ask]).returncode == 0

    def stop(self) -> None:
        """Begin to end the pod as the kubelet does: SIGTERM to its first process."""
        self.run(["kill", "-TERM", "1"])

    def end(self, grace_s: float) -> None:
        """Wait until a stopped pod has ended; after its grace period, kill it."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(grace_s)
        self.kill()

    def kill(self) -> None:
        """End the pod at once."""
        self.process.kill()
        self.process.wait()
        self._log.close()


class PodNetwork:
    """The pods of a release, and the ways in.

    Args:
        objects: rendered objects of the release.
        shared: folders that all pods see in `/tmp`, by name.
    """

    def __init__(self, objects: list[Object], shared: dict[str, Path]) -> None:
        self.objects, self.shared = objects, shared
        self.folder = run.folder() / "pods"
        self.folder.mkdir()
        self.token = secrets.token_hex(16)
        self.pods: dict[str, Pod] = {}
        self._count = 0
        self._forwarders: list[subprocess.Popen[bytes]] = []
        self._switch = subprocess.Popen(["unshare", "--net", "sleep", "infinity"])
        until(lambda: self._is_apart(self._switch.pid), 10, "the bridge's network")
        self._in_switch(
            f"ip link set lo up; ip link add br0 type bridge; ip addr add {BRIDGE}/24 dev br0; "
            "ip link set br0 up"
        )

    def start(self, group_name: str) -> Pod:
        """Start a pod of a group and give it an address. The head comes first."""
        group = groups(self.objects)[group_name]
        self._count += 1
        name, address = f"{group_name}-{self._count}", f"10.77.0.{self._count}"
        head = None if group_name == "head" else self.pods["head"].address
        env = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": self.token}
        command = ray_start(group, head)
        pod = Pod(name, address, group, command, self.folder / name, env, self.shared)
        until(lambda: self._is_apart(pod.process.pid), 10, f"the network of {name}")
        link = f"v{self._count}"
        self._in_switch(
            f"ip link add {link} type veth peer name eth0 netns {pod.process.pid}; "
            f"ip link set {link} master br0 up"
        )
        self._inside(
            pod.process.pid,
            f"ip link set lo up; ip addr add {address}/24 dev eth0; ip link set eth0 up; "
            f"ip route add default via {BRIDGE}",
        )
        self.pods[group_name if group_name == "head" else name] = pod
        return pod

    def client(
        self, pod: Pod, port: int, namespace: dict[str, str], **options: Any
    ) -> httpx.Client:
        """An HTTP client in another namespace of the cluster.

        Raises:
            PermissionError: the release's policies do not let it in.
        """
        policies = of_kind(self.objects, "NetworkPolicy")
        if not allowed(policies, "Ingress", pod.labels, {}, namespace, port):
            raise PermissionError(f"{namespace} does not reach port {port} of {pod.name}")
        return self._forwarded(self._switch.pid, pod.address, port, **options)

    def port_forward(self, pod: Pod, port: int, **options: Any) -> httpx.Client:
        """An HTTP client through `kubectl port-forward`: no policy holds, and the pod sees a client
        on its own loopback."""
        return self._forwarded(pod.process.pid, "127.0.0.1", port, **options)

    def _forwarded(self, network_of: int, host: str, port: int, **options: Any) -> httpx.Client:
        """A client whose connections begin in the network of a process."""
        path = self.folder / f"forward-{len(self._forwarders)}.sock"
        command = [sys.executable, "-m", __name__, str(path), host, str(port)]
        enter = ["nsenter", "--target", str(network_of), "--net"]
        self._forwarders.append(subprocess.Popen([*enter, *command]))
        until(path.exists, 30, "the forwarder")
        transport = httpx.HTTPTransport(uds=str(path))
        return httpx.Client(transport=transport, base_url=f"http://{host}:{port}", **options)

    def logs(self, lines: int = 15) -> str:
        """The ends of the pods' logs, and of Serve's in them."""
        out = []
        for pod in self.pods.values():
            serve = pod.folder.glob("ray/session_2*/logs/serve/*.log")
            for file in (pod.log, *sorted(serve)):
                text = file.read_text("utf-8", errors="replace").splitlines()[-lines:]
                out += [f"--- {pod.name} {file.name}", *text]
        return "\n".join(out)

    def close(self) -> None:
        """End all."""
        for pod in self.pods.values():
            pod.kill()
        for process in (*self._forwarders, self._switch):
            process.kill()
            process.wait()

    def _in_switch(self, script: str) -> None:
        self._inside(self._switch.pid, script)

    @staticmethod
    def _inside(pid: int, script: str) -> None:
        enter = ["nsenter", "--target", str(pid), "--net", "sh", "-ec", script]
        subprocess.run(enter, check=True, capture_output=True, timeout=30)

    @staticmethod
    def _is_apart(pid: int) -> bool:
        with contextlib.suppress(OSError):
            own, other = (os.readlink(f"/proc/{each}/ns/net") for each in ("self", pid))
            return own != other
        return False


async def _forward(path: str, host: str, port: int) -> None:
    async def copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(1 << 16):
                sink.write(data)
                await sink.drain()
        with contextlib.suppress(OSError):
            sink.close()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there, back = await asyncio.open_connection(host, port)
        except OSError:
            writer.close()
            return
        await asyncio.gather(copy(reader, back), copy(there, writer))

    server = await asyncio.start_unix_server(handle, path)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(_forward(sys.argv[1], sys.argv[2], int(sys.argv[3])))
