"""Measurements for `headrace doctor`: plain values, no judgement.

Code that can crash or hang runs in another process, with a time limit. Nothing here makes a CUDA
context, so GPUs stay free.
"""

from headrace.cli.probes.disk import Folder, ModelFiles, folder, hub_snapshot, model_files
from headrace.cli.probes.facts import describe
from headrace.cli.probes.gpu import (
    Driver,
    Gpu,
    cuda_driver,
    driver_version,
    gds_driver,
    gpu_nodes,
    nvidia_smi,
    torch_cuda,
)
from headrace.cli.probes.machine import (
    available_memory_bytes,
    dead_instances,
    gpus,
    model,
    nixl_plugins,
    open_file_limits,
    package_versions,
    port,
    python_version,
    rdma_devices,
    shm_free_bytes,
    torch_import,
)
from headrace.cli.probes.net import (
    clock_skew_s,
    hub_answer,
    hub_cache,
    hub_token,
    kubernetes_url,
    offline,
)
from headrace.cli.probes.pod import (
    User,
    has_ipc_lock,
    interfaces,
    memlock_bytes,
    memory_limit_bytes,
    needed_folders,
    pids_limit,
    ray_token,
    rdma_nodes,
    user,
    write_error,
)

__all__ = [
    "Driver",
    "Folder",
    "Gpu",
    "ModelFiles",
    "User",
    "available_memory_bytes",
    "clock_skew_s",
    "cuda_driver",
    "dead_instances",
    "describe",
    "driver_version",
    "folder",
    "gds_driver",
    "gpu_nodes",
    "gpus",
    "has_ipc_lock",
    "hub_answer",
    "hub_cache",
    "hub_snapshot",
    "hub_token",
    "interfaces",
    "kubernetes_url",
    "memlock_bytes",
    "memory_limit_bytes",
    "model",
    "model_files",
    "needed_folders",
    "nixl_plugins",
    "nvidia_smi",
    "offline",
    "open_file_limits",
    "package_versions",
    "pids_limit",
    "port",
    "python_version",
    "ray_token",
    "rdma_devices",
    "rdma_nodes",
    "shm_free_bytes",
    "torch_cuda",
    "torch_import",
    "user",
    "write_error",
]
