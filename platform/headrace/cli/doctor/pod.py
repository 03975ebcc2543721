"""The checks of one pod of a cluster, for its role and the app's configuration."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal, get_args

from headrace.cli import probes
from headrace.cli.cluster import port_is_free
from headrace.cli.doctor import agreement, hardware, left_out, machine, storage, surroundings
from headrace.cli.doctor.finding import Check, Finding
from headrace.config import HeadraceConfig, RoleSettings
from headrace.config.section import GIB

Role = Literal["prefill", "decode", "gateway", "head"]
ROLES: tuple[Role, ...] = get_args(Role)

# Ray's own ports of the head: GCS, dashboard, client.
HEAD_PORTS = [6379, 8265, 10001]


@dataclass(frozen=True)
class Pod:
    """One pod: its role, the configuration of the app, and how it was started.

    Attributes:
        config: the configuration of its model, as if it were the only one.
        engines: engines that run in it at once.
        expect_rdma: whether the pod asked for an RDMA resource.
        clock_url: server whose clock counts; None takes the Kubernetes API.
    """

    role: Role
    config: HeadraceConfig
    engines: int = 1
    expect_rdma: bool = False
    clock_url: str | None = None

    @property
    def engine(self) -> RoleSettings | None:
        """The settings of the pod's engines; None if it runs none."""
        return self.config.roles().get(self.role)

    @property
    def arena_bytes(self) -> int:
        """Shared memory of the KV store."""
        store = self.config.store
        return int(store.dram_gb * GIB) if self.engine and store.enabled else 0

    @property
    def gpus(self) -> int:
        return self.engines * self.engine.gpus if self.engine else 0

    @property
    def memory_bytes(self) -> int:
        """Memory that the pod takes when it is busy, roughly; /dev/shm included."""
        shared = self.arena_bytes + self.config.ray.object_store_bytes
        if self.engine is None:
            return shared + machine.ENGINE_OVERHEAD_BYTES
        kv = (self.engine.kv_cache_bytes or 0) if self.engine.gpus == 0 else 0
        each = kv + machine.ENGINE_OVERHEAD_BYTES * max(1, self.engine.world_size)
        return shared + self.engines * each

    @cached_property
    def model_folder(self) -> Path | None:
        """Folder of the model's files on this machine, if they are here."""
        return probes.model_folder(self.config.model.id, self.config.model.source)

    @property
    def shape(self) -> tuple[int | None, int | None]:
        """(KV heads, KV bytes per token) of the model; None where they are not known."""
        from headrace.model import ModelError, describe

        try:
            facts = describe(self.model_folder) if self.model_folder else None
        except ModelError:
            facts = None
        return (facts.kv_heads, facts.kv_bytes_per_token) if facts else (None, None)


def checks(pod: Pod, env: Mapping[str, str] = os.environ) -> list[Check]:
    """Return the checks for the pod's role, in order."""
    out: list[Check] = [
        ("user", lambda: [surroundings.user(probes.user(env))]),
        ("writable folders", lambda: storage.writable(_write_errors(env))),
        ("open files", lambda: [surroundings.open_files(*probes.open_file_limits())]),
        ("threads", lambda: [surroundings.threads(probes.pids_limit())]),
        ("memory limit", lambda: [storage.memory(probes.memory_limit_bytes(), pod.memory_bytes)]),
        ("/dev/shm", lambda: [_shm(pod)]),
        ("ports", lambda: _ports(pod)),
        ("Ray token", lambda: [surroundings.ray_token(*probes.ray_token(env))]),
        ("clock", lambda: _clock(pod, env)),
        ("hash seed", lambda: [agreement.hash_seed(pod.config)]),
        ("environment", lambda: agreement.environment(pod.config)),
        ("parallelism", lambda: [agreement.parallel(pod.config, pod.shape[0])]),
    ]
    if pod.engine is not None:
        out += [
            ("packages", lambda: machine.packages(probes.package_versions())),
            ("NVMe", lambda: _nvme(pod)),
            ("model", lambda: [_model(pod, env)]),
            ("left out", lambda: _left_out(pod)),
            ("NIXL", lambda: [hardware.nixl(*probes.nixl_plugins(), env.get("NIXL_PLUGIN_DIR"))]),
            ("RDMA", lambda: _rdma(pod, env)),
        ]
    if pod.gpus:
        out += [
            ("driver", lambda: [hardware.driver(probes.torch_cuda(), probes.cuda_driver())]),
            ("NVMe to GPU", lambda: _nvme_to_gpu(pod)),
            ("GPUs", lambda: hardware.gpus(*probes.nvidia_smi(), probes.gpu_nodes(), pod.gpus)),
        ]
    return out


def _left_out(pod: Pod) -> list[Finding]:
    roles = [pod.engine] if pod.engine else []
    return left_out.expected(pod.config, roles, probes.model_config(pod.model_folder))


def _write_errors(env: Mapping[str, str]) -> dict[str, str]:
    return {name: probes.write_error(path) for name, path in probes.needed_folders(env).items()}


def _shm(pod: Pod) -> Finding:
    store = pod.config.ray.object_store_bytes
    return storage.shm(probes.shm_free_bytes(), pod.arena_bytes, store)


def _ports(pod: Pod) -> list[Finding]:
    wanted = HEAD_PORTS if pod.role == "head" else []
    if pod.role == "gateway" and pod.config.gateway.port:
        wanted = [pod.config.gateway.port]
    taken = [p for p in wanted if not port_is_free("0.0.0.0", p)]
    return [surroundings.ports(taken, wanted)] if wanted else []


def _clock(pod: Pod, env: Mapping[str, str]) -> list[Finding]:
    url = pod.clock_url or probes.kubernetes_url(env)
    if url is None:
        return []
    return [surroundings.clock(probes.clock_skew_s(url), url)]


def _nvme(pod: Pod) -> list[Finding]:
    store = pod.config.store
    if not store.enabled or store.nvme_folder is None:
        return []
    return [storage.nvme(probes.folder(Path(store.nvme_folder)), int(store.nvme_gb * GIB))]


def _nvme_to_gpu(pod: Pod) -> list[Finding]:
    store = pod.config.store
    if not store.enabled or store.nvme_folder is None:
        return []
    plugins, _ = probes.nixl_plugins()
    file_system = probes.folder(Path(store.nvme_folder)).file_system
    return [storage.to_gpu(plugins, probes.gds_driver(), file_system)]


def _rdma(pod: Pod, env: Mapping[str, str]) -> list[Finding]:
    nodes = probes.rdma_nodes()
    seen = hardware.rdma(
        probes.rdma_devices(),
        nodes,
        pod.expect_rdma,
        env.get("UCX_NET_DEVICES"),
        probes.interfaces(),
    )
    locked = hardware.memlock(
        probes.memlock_bytes(), probes.has_ipc_lock(), bool(nodes) or pod.expect_rdma
    )
    return [seen, locked]


def _model(pod: Pod, env: Mapping[str, str]) -> Finding:
    source, folder = pod.config.model.source, pod.model_folder
    if source is None:
        return machine.model(*probes.model(pod.config.model.id))
    if Path(source).expanduser().is_dir() or source.startswith(("/", ".", "~")):
        return storage.model_folder(probes.model_files(Path(source).expanduser()), source)
    cached = probes.model_files(folder) if folder is not None else None
    status, error = None, ""
    if (cached is None or cached.problems) and not probes.offline(env):
        status, error = probes.hub_answer(source, env)
    has_token = probes.hub_token(env) is not None
    found = storage.model_hub(source, cached, probes.offline(env), status, error, has_token)
    if status is None or found.level != "OK":
        return found
    there = cached.weight_bytes if cached is not None else 0
    size, room = probes.hub_weight_bytes(source, env), probes.model_room_bytes(env)
    return storage.model_room(source, size, room, there)
