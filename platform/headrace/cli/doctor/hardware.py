"""Judges a pod's accelerators and network cards: driver, GPUs, NIXL, RDMA and locked memory."""

from __future__ import annotations

from headrace.cli import probes
from headrace.cli.console import human_bytes
from headrace.cli.doctor.finding import Finding

# Oldest driver for each CUDA major version (NVIDIA's "CUDA Compatibility", minor versions).
OLDEST_DRIVER = {11: 450, 12: 525, 13: 580}
BUSY_BYTES = 2**30
ENOUGH_MEMLOCK = 2**30


def driver(build: str | None, seen: probes.Driver) -> Finding:
    """Check that the driver can run the CUDA for which torch was built; `build` is None for a CPU
    build."""
    if build is None:
        remedy = "use the gpu image (values `image.repository`), which has torch for CUDA"
        return Finding("driver", "FAIL", "torch is a CPU build, but the role asks for GPUs", remedy)
    major = int(build.split(".")[0])
    oldest = OLDEST_DRIVER.get(major)
    wanted = f"CUDA {build}" + (f" wants driver {oldest} or newer" if oldest else "")
    if seen.version is None and seen.cuda is None:
        return Finding(
            "driver",
            "FAIL",
            "no NVIDIA driver is visible in this container",
            "schedule the pod on a GPU node (nodeSelector, tolerations), give this init container "
            "the same GPU resources as the main one, and set `runtimeClassName: nvidia` if the "
            "cluster's default runtime is another (in the chart: ROLE.podTemplate.spec)",
        )
    if seen.cuda is None:
        return Finding(
            "driver",
            "FAIL",
            f"driver {seen.version or 'unknown'}, but libcuda.so.1 cannot be loaded: {seen.error}",
            "set NVIDIA_DRIVER_CAPABILITIES to `compute,utility`, and check the node's NVIDIA "
            "container toolkit",
        )
    speaks = f"driver {seen.version or 'unknown'}, CUDA {seen.cuda[0]}.{seen.cuda[1]}"
    if seen.cuda[0] < major:
        remedy = (
            "update the node's driver (GPU operator: driver.version), or use nodes that have it"
        )
        return Finding("driver", "FAIL", f"{speaks}, but {wanted}", remedy)
    return Finding("driver", "OK", f"{speaks}; torch is built for {build}")


def gpus(found: list[probes.Gpu], error: str, nodes: list[str], wanted: int) -> list[Finding]:
    """Check that there are as many GPUs as the pod's engines take, without other users.

    Args:
        nodes: device files, which count where nvidia-smi is missing.
    """
    count = len(found) or len(nodes)
    words = ", ".join(g.name for g in found) or (f"{len(nodes)} device files" if nodes else error)
    if count < wanted:
        return [
            Finding(
                "GPUs",
                "FAIL",
                f"{count} visible, {wanted} needed ({words or 'none'})",
                f"set the GPU count of this role's pods to {wanted} (resources of the main and of "
                "this init container: Kubernetes counts the larger, not the sum), or lower "
                "tensor_parallel_size and `gpus`",
            )
        ]
    busy = [g for g in found if g.used_bytes > BUSY_BYTES]
    if busy:
        held = max(g.used_bytes for g in busy)
        return [
            Finding(
                "GPUs",
                "WARN",
                f"{len(busy)} of {count} already hold up to {human_bytes(held)}",
                "end what uses them on the node, or lower gpu_memory_utilization: vLLM counts only "
                "memory that is free",
            )
        ]
    return [Finding("GPUs", "OK", f"{count}: {words}")]


def rdma(
    devices: list[str],
    nodes: list[str],
    expected: bool,
    net_devices: str | None,
    interfaces: list[str],
) -> Finding:
    """Check that RDMA can be used, if the pod asked for it.

    Args:
        devices: RDMA devices in sysfs, which shows those of the whole machine.
        nodes: uverbs device files, which only a container with the resource has.
        net_devices: UCX_NET_DEVICES.
        interfaces: network interfaces, which UCX_NET_DEVICES may name for TCP.
    """
    named = [d.split(":")[0] for d in (net_devices or "").split(",") if d.strip()]
    missing = [d for d in named if d not in {*devices, *interfaces, "all"}]
    if missing:
        return Finding(
            "RDMA",
            "FAIL",
            f"UCX_NET_DEVICES names {', '.join(missing)}; this machine has "
            f"{', '.join(devices) or 'no RDMA device'}",
            "leave UCX_NET_DEVICES out (UCX finds the nearest device), or name devices that every "
            "node has",
        )
    if expected and not nodes:
        found = "no /dev/infiniband/uverbs* in this container"
        if devices:
            found += f", though the node has {', '.join(devices)}"
        return Finding(
            "RDMA",
            "FAIL",
            found,
            "request the device plugin's resource (values `decode.resources`: rdma/ib, "
            "rdma/hca_shared_devices, vpc.amazonaws.com/efa, ...), or switch it off to use TCP",
        )
    if nodes:
        return Finding("RDMA", "OK", f"{', '.join(devices)} ({len(nodes)} usable)")
    if devices:
        return Finding(
            "RDMA",
            "WARN",
            f"the node has {', '.join(devices)}, but this container may not use them: KV goes over "
            "TCP",
            "request the device plugin's resource (values `decode.resources`)",
        )
    return Finding("RDMA", "OK", "no device (shared memory and TCP are used)")


def memlock(limit_bytes: int | None, ipc_lock: bool, needed: bool) -> Finding:
    """Check that memory can be registered with the network card, which keeps it locked.

    Args:
        limit_bytes: None if there is no limit.
        needed: whether RDMA is used.
    """
    if limit_bytes is None or ipc_lock:
        return Finding("locked memory", "OK", "IPC_LOCK" if ipc_lock else "no limit")
    found = f"limit {human_bytes(limit_bytes)}, without the capability IPC_LOCK"
    if not needed:
        return Finding("locked memory", "OK", f"{found} (RDMA is not used)")
    if limit_bytes >= ENOUGH_MEMLOCK:
        return Finding("locked memory", "WARN", found, "add the capability IPC_LOCK")
    return Finding(
        "locked memory",
        "FAIL",
        f"{found}: registering KV for RDMA would fail (NIXL_ERR_BACKEND)",
        "add the capability IPC_LOCK (values `decode.ipcLock`; pod security `baseline` forbids it) "
        "or raise LimitMEMLOCK of the node's container runtime",
    )


def nixl(plugins: list[str], error: str, plugin_dir: str | None) -> Finding:
    """Check that NIXL makes an agent that can talk to other machines.

    Args:
        plugin_dir: NIXL_PLUGIN_DIR.
    """
    if not plugins:
        remedy = (
            "use Headrace's image, with a network and with /sys, where UCX lists its devices; "
            "without NIXL every prefill is local"
        )
        if plugin_dir:
            remedy = f"NIXL_PLUGIN_DIR is {plugin_dir}: remove it, so that NIXL finds its own"
        return Finding("NIXL", "FAIL", error or "no plugin", remedy)
    if not {"UCX", "LIBFABRIC"} & set(plugins):
        where = f" in NIXL_PLUGIN_DIR {plugin_dir}" if plugin_dir else ""
        return Finding(
            "NIXL",
            "FAIL",
            f"neither UCX nor LIBFABRIC{where}: {', '.join(plugins)}",
            "remove NIXL_PLUGIN_DIR, or name the folder of nixl's own plugins",
        )
    return Finding("NIXL", "OK", ", ".join(plugins))
