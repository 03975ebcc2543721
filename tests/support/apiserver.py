"""A real Kubernetes API server on this machine's loopback: etcd and kube-apiserver, with KubeRay's
CRDs. No node, scheduler or operator runs, so objects are taken, defaulted, validated and kept.

The binaries are those that Kubernetes' own tests use (`setup-envtest`); `KUBEBUILDER_ASSETS` names
their folder. A kube-controller-manager in it adds the controller of disruption budgets.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from tests.support.app import until
from tests.support.certificates import Authority
from tests.support.chart_objects import Object, ray_service_schema

VARIABLE = "KUBEBUILDER_ASSETS"
NEEDED = ("etcd", "kube-apiserver")
HOW_TO_GET = (
    f"{VARIABLE} must name a folder with kube-apiserver and etcd: "
    "export KUBEBUILDER_ASSETS=$(setup-envtest use -p path 1.36); CONTRIBUTING.md says more"
)
RAY = {"RayService": "rayservices", "RayCluster": "rayclusters"}
OTHERS = {
    "PodMonitor": ("monitoring.coreos.com", "v1", "podmonitors"),
    "PrometheusRule": ("monitoring.coreos.com", "v1", "prometheusrules"),
    "HTTPRoute": ("gateway.networking.k8s.io", "v1", "httproutes"),
    "Certificate": ("cert-manager.io", "v1", "certificates"),
    "Route": ("route.openshift.io", "v1", "routes"),
}
"""Kinds that other operators bring, as (group, version, plural). Their fields are free here."""
BUILT_IN = {
    "ConfigMap": ("", "v1", "configmaps"),
    "Secret": ("", "v1", "secrets"),
    "Service": ("", "v1", "services"),
    "ServiceAccount": ("", "v1", "serviceaccounts"),
    "PersistentVolumeClaim": ("", "v1", "persistentvolumeclaims"),
    "Pod": ("", "v1", "pods"),
    "Job": ("batch", "v1", "jobs"),
    "PodDisruptionBudget": ("policy", "v1", "poddisruptionbudgets"),
    "NetworkPolicy": ("networking.k8s.io", "v1", "networkpolicies"),
    "Ingress": ("networking.k8s.io", "v1", "ingresses"),
}
CUSTOM = OTHERS | {kind: ("ray.io", "v1", plural) for kind, plural in RAY.items()}
KINDS = BUILT_IN | CUSTOM
AT_HAND: list[Object] = [
    {
        "apiVersion": "scheduling.k8s.io/v1",
        "kind": "PriorityClass",
        "metadata": {"name": "high"},
        "value": 1000,
    },
    {
        "apiVersion": "node.k8s.io/v1",
        "kind": "RuntimeClass",
        "metadata": {"name": "nvidia"},
        "handler": "nvidia",
    },
]
"""Objects of the cluster that the pods of some sets of values name."""
ACCOUNTS = ("default", "own")
"""ServiceAccounts that namespaces have, or that sets of values name."""
START_S = 120.0


def assets() -> Path | None:
    """The folder with the binaries; None without them."""
    folder = Path(os.environ.get(VARIABLE) or "/nowhere")
    return folder if all(os.access(folder / name, os.X_OK) for name in NEEDED) else None


def definitions() -> list[Object]:
    """The CRDs: KubeRay's with their schemas, those of others without."""
    service = ray_service_schema()
    cluster = service["properties"]["spec"]["properties"]["rayClusterConfig"]
    free = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    schemas = {
        "RayService": service,
        "RayCluster": {"type": "object", "properties": {"spec": cluster, "status": free}},
    }
    made = []
    for kind, (group, version, plural) in CUSTOM.items():
        served = {
            "name": version,
            "served": True,
            "storage": True,
            "schema": {"openAPIV3Schema": schemas.get(kind, free)},
            "subresources": {"status": {}},
        }
        names = {"kind": kind, "listKind": f"{kind}List", "plural": plural}
        made.append(
            {
                "apiVersion": "apiextensions.k8s.io/v1",
                "kind": "CustomResourceDefinition",
                "metadata": {
                    "name": f"{plural}.{group}",
                    # Groups of *.k8s.io are protected.
                    "annotations": {"api-approved.kubernetes.io": "unapproved, for a test"},
                },
                "spec": {
                    "group": group,
                    "names": {**names, "singular": kind.lower()},
                    "scope": "Namespaced",
                    "versions": [served],
                },
            }
        )
    return made


class ApiServer:
    """The running server.

    Attributes:
        client: an administrator's HTTP client.
        kubeconfig: a file for Helm and kubectl, as the same administrator.
    """

    def __init__(self, binaries: Path, folder: Path) -> None:
        self.folder, self._binaries = folder, binaries
        self._processes: list[subprocess.Popen[bytes]] = []
        self._namespaces = 0
        authority = Authority(folder)
        cert, key = authority.issue("server")
        accounts = _account_key(folder)
        token = secrets.token_hex(16)
        (folder / "tokens.csv").write_text(f'{token},admin,1,"system:masters"\n')
        etcd, peers, port = _free_ports(3)
        self._start(
            "etcd",
            *(f"--data-dir={folder / 'etcd'}", "--unsafe-no-fsync"),
            f"--listen-client-urls=http://127.0.0.1:{etcd}",
            f"--advertise-client-urls=http://127.0.0.1:{etcd}",
            f"--listen-peer-urls=http://127.0.0.1:{peers}",
        )
        self._start(
            "kube-apiserver",
            f"--etcd-servers=http://127.0.0.1:{etcd}",
            *("--bind-address=127.0.0.1", "--advertise-address=127.0.0.1"),
            f"--secure-port={port}",
            *(f"--tls-cert-file={cert}", f"--tls-private-key-file={key}"),
            *(f"--cert-dir={folder}", f"--token-auth-file={folder / 'tokens.csv'}"),
            f"--service-account-issuer=https://127.0.0.1:{port}",
            f"--service-account-key-file={accounts}",
            f"--service-account-signing-key-file={accounts}",
            "--service-cluster-ip-range=10.96.0.0/16,fd00:10:96::/112",
            *("--authorization-mode=RBAC", "--allow-privileged=true"),
        )
        self.url = f"https://127.0.0.1:{port}"
        self.client = httpx.Client(
            base_url=self.url,
            verify=authority.client(),
            headers={"authorization": f"Bearer {token}"},
            timeout=60,
        )
        self.kubeconfig = folder / "kubeconfig"
        self.kubeconfig.write_text(_kubeconfig(self.url, authority.file, token))
        until(self._is_ready, START_S, "the API server is ready", self.logs)
        for one in [*definitions(), *AT_HAND]:
            self.create(one)
        until(self._has_kinds, START_S, "the API server knows the custom kinds", self.logs)

    # Objects

    def namespace(self, **labels: str) -> str:
        """The name of a new namespace with `ACCOUNTS`."""
        self._namespaces += 1
        name = f"ns-{self._namespaces}"
        metadata = {"name": name, "labels": labels}
        self.create({"apiVersion": "v1", "kind": "Namespace", "metadata": metadata})
        for account in ACCOUNTS:
            self.create(
                {
                    "apiVersion": "v1",
                    "kind": "ServiceAccount",
                    "metadata": {"name": account},
                },
                name,
            )
        return name

    def path(self, kind: str, namespace: str, name: str = "") -> str:
        """The path of an object, or of all of its kind in a namespace."""
        group, version, plural = KINDS[kind]
        root = f"/apis/{group}/{version}" if group else f"/api/{version}"
        return f"{root}/namespaces/{namespace}/{plural}" + (f"/{name}" if name else "")

    def create(self, one: Object, namespace: str = "", dry_run: bool = False) -> Object:
        """Create an object as Helm 3 does; unknown and repeated fields are errors.

        Raises:
            Refused: the server's answer.
        """
        path = _cluster_path(one) if not namespace else self.path(one["kind"], namespace)
        options = {"fieldValidation": "Strict"} | ({"dryRun": "All"} if dry_run else {})
        return self.ask("POST", path, one, options)

    def get(self, kind: str, namespace: str, name: str) -> Object:
        """An object as the server keeps it."""
        return self.ask("GET", self.path(kind, namespace, name))

    def list(self, kind: str, namespace: str) -> list[Object]:
        """All objects of a kind in a namespace."""
        return [
            {"kind": kind, **one} for one in self.ask("GET", self.path(kind, namespace))["items"]
        ]

    def ask(
        self,
        method: str,
        path: str,
        body: Any = None,
        options: dict[str, str] | None = None,
        content_type: str = "application/json",
    ) -> Object:
        """Send a request.

        Raises:
            Refused: the server's answer is an error.
        """
        answer = self.client.request(
            method,
            path,
            params=options,
            content=None if body is None else json.dumps(body),
            headers={"content-type": content_type},
        )
        if answer.is_error:
            raise Refused(answer)
        return dict(answer.json())

    # Processes

    def start_controllers(self, *controllers: str) -> bool:
        """Run some of Kubernetes' controllers; False where kube-controller-manager is missing."""
        if not os.access(self._binaries / "kube-controller-manager", os.X_OK):
            return False
        [port] = _free_ports(1)
        self._start(
            "kube-controller-manager",
            *(f"--kubeconfig={self.kubeconfig}", f"--controllers={','.join(controllers)}"),
            *("--leader-elect=false", "--bind-address=127.0.0.1", f"--secure-port={port}"),
            f"--cert-dir={self.folder}",
        )
        return True

    def logs(self) -> str:
        """The ends of the processes' logs."""
        out = []
        for file in sorted(self.folder.glob("*.log")):
            out += [f"--- {file.name}", *file.read_text(errors="replace").splitlines()[-15:]]
        return "\n".join(out)

    def close(self) -> None:
        """End all."""
        for process in reversed(self._processes):
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(10)
            process.kill()
            process.wait()

    def _start(self, name: str, *arguments: str) -> None:
        with (self.folder / f"{name}.log").open("wb") as log:
            command = [str(self._binaries / name), *arguments]
            self._processes.append(subprocess.Popen(command, stdout=log, stderr=log))

    def _is_ready(self) -> bool:
        for process in self._processes:
            if process.poll() is not None:
                raise RuntimeError(f"{process.args} ended\n{self.logs()}")
        with suppress(httpx.HTTPError):
            # `default` is made after the start, and priority classes with it.
            ready = self.client.get("/readyz").status_code == 200
            return ready and self.client.get("/api/v1/namespaces/default").status_code == 200
        return False

    def _has_kinds(self) -> bool:
        paths = (self.path(kind, "default") for kind in CUSTOM)
        return all(self.client.get(path).status_code == 200 for path in paths)


class Refused(Exception):
    """An error that the API server answered.

    Attributes:
        code: the HTTP status.
    """

    def __init__(self, answer: httpx.Response) -> None:
        self.code = answer.status_code
        with suppress(ValueError):
            super().__init__(answer.json()["message"])
            return
        super().__init__(answer.text)


@contextmanager
def running(folder: Path) -> Iterator[ApiServer]:
    """A server for some tests."""
    binaries = assets()
    assert binaries is not None, HOW_TO_GET
    server = ApiServer(binaries, folder)
    try:
        yield server
    finally:
        server.close()


def _cluster_path(one: Object) -> str:
    """The path of a kind that has no namespace."""
    group, _, version = one["apiVersion"].rpartition("/")
    plural = one["kind"].lower() + ("es" if one["kind"].endswith("s") else "s")
    return f"/apis/{group}/{version}/{plural}" if group else f"/api/{version}/{plural}"


def _kubeconfig(url: str, authority: Path, token: str) -> str:
    cluster = {"server": url, "certificate-authority": str(authority)}
    return json.dumps(
        {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "test",
            "clusters": [{"name": "test", "cluster": cluster}],
            "users": [{"name": "test", "user": {"token": token}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
        }
    )


def _account_key(folder: Path) -> Path:
    """A key for tokens of ServiceAccounts, in the one form that the server takes for both uses."""
    made = ec.generate_private_key(ec.SECP256R1()).private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.TraditionalOpenSSL,
        serialization.NoEncryption(),
    )
    (path := folder / "accounts.key").write_bytes(made)
    return path


def _free_ports(count: int) -> Sequence[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports
