"""Judges a pod's memory, shared memory, disk, writable folders and model files."""

from __future__ import annotations

from collections.abc import Mapping

from headrace.cli import probes
from headrace.cli.console import human_bytes
from headrace.cli.doctor.finding import Finding

SPARE_MODEL_BYTES = 2**30  # a model's other files
SPARE_SHM_BYTES = 256 * 2**20  # the engines' queues and semaphores
GDS_FILE_SYSTEMS = "ext4", "xfs"  # on a local disk; NVIDIA's GPUDirect Storage guide
NETWORK_FILE_SYSTEMS = ("nfs", "nfs4", "cifs", "ceph", "lustre", "fuse.s3fs", "9p")


def shm(free_bytes: int, arena_bytes: int, object_store_bytes: int) -> Finding:
    """Check that /dev/shm holds the store's arena and Ray's object store."""
    held = arena_bytes + object_store_bytes
    found = (
        f"{human_bytes(free_bytes)} free; the store's arena takes {human_bytes(arena_bytes)}, "
        f"Ray's object store {human_bytes(object_store_bytes)}"
    )
    if free_bytes < held + SPARE_SHM_BYTES:
        return Finding(
            "/dev/shm",
            "FAIL" if free_bytes < held else "WARN",
            found,
            f"mount an emptyDir (medium: Memory, sizeLimit {gib(held + SPARE_SHM_BYTES)}) at "
            "/dev/shm (the chart does), or lower store.dram_gb",
        )
    return Finding("/dev/shm", "OK", found)


def memory(limit_bytes: int | None, needed_bytes: int) -> Finding:
    """Check that the container's memory limit covers the plan; /dev/shm counts towards it."""
    if limit_bytes is None:
        return Finding("memory limit", "OK", f"none; about {human_bytes(needed_bytes)} needed")
    found = f"{human_bytes(limit_bytes)}; about {human_bytes(needed_bytes)} needed"
    if limit_bytes < needed_bytes:
        return Finding(
            "memory limit",
            "FAIL" if limit_bytes < needed_bytes * 3 // 4 else "WARN",
            found + " (/dev/shm counts)",
            f"raise this role's `resources.limits.memory` to {gib(needed_bytes)} or more (on this "
            "init container too), or lower store.dram_gb and kv_cache_gb",
        )
    return Finding("memory limit", "OK", found)


def nvme(folder: probes.Folder, wanted_bytes: int) -> Finding:
    """Check that the folder of the NVMe tier can be written, is a disk and has room."""
    where = folder.path
    if folder.error:
        return Finding(
            "NVMe",
            "FAIL",
            f"{where}: {folder.error}",
            "mount the volume of values `disk` there, in this init container too, and let "
            "the pod's user write to it (securityContext.fsGroup; a hostPath must be made with "
            "that owner)",
        )
    room = folder.free_bytes + folder.held_bytes
    found = f"{where}: {folder.file_system}, {human_bytes(room)} of {human_bytes(wanted_bytes)}"
    if room < wanted_bytes:
        return Finding(
            "NVMe",
            "FAIL",
            found,
            f"lower store.nvme_gb to {room // 2**30}, or use a larger volume",
        )
    if folder.file_system in ("overlay", "tmpfs"):
        kind = "the container's own layer" if folder.file_system == "overlay" else "memory"
        return Finding(
            "NVMe",
            "WARN",
            f"{found}; this is {kind}, not a disk",
            "mount a volume there (values `disk`: hostPath, local or ephemeral volume)",
        )
    if folder.file_system in NETWORK_FILE_SYSTEMS:
        remedy = "use a local disk; for shared storage there is the object tier (store.object_url)"
        return Finding("NVMe", "WARN", f"{found}; a network file system", remedy)
    if not folder.direct:
        remedy = "use ext4 or xfs on a local disk; without O_DIRECT, reads compete for page cache"
        return Finding("NVMe", "WARN", f"{found}; no direct I/O", remedy)
    return Finding("NVMe", "OK", f"{found}, direct I/O")


def to_gpu(plugins: list[str], gds_driver: bool, file_system: str) -> Finding:
    """Report how blocks get from the NVMe tier into GPU memory.

    Args:
        plugins: of NIXL.
        gds_driver: whether the kernel module nvidia_fs is loaded.
        file_system: of the tier's folder.
    """
    lacking = []
    if "GDS_MT" not in plugins:
        lacking.append("NIXL has no plugin GDS_MT")
    if not gds_driver:
        lacking.append("the kernel module nvidia_fs is not loaded")
    if file_system not in GDS_FILE_SYSTEMS:
        lacking.append(f"{file_system} is not {' or '.join(GDS_FILE_SYSTEMS)}")
    found = (
        "GPUDirect Storage is there: at its first load from disk each engine measures it against "
        "reads through registered host memory, takes the faster, and logs which and why"
    )
    if lacking:
        why = "; ".join(lacking)
        found = f"through registered host memory; GPUDirect Storage would not work here: {why}"
    return Finding("NVMe to GPU", "OK", found)


def writable(errors: Mapping[str, str]) -> list[Finding]:
    """Check the folders that engines and Ray write to; `errors` has the error of each, or ""."""
    wrong = {name: error for name, error in errors.items() if error}
    if not wrong:
        return [Finding("writable folders", "OK", ", ".join(errors))]
    return [
        Finding(
            "writable folders",
            "FAIL",
            f"{name} cannot be written: {error}",
            f"mount an emptyDir and set {name} to a folder in it (the chart does, unless "
            "`volumes` or `env` were overridden)",
        )
        for name, error in wrong.items()
    ]


def model_folder(files: probes.ModelFiles, source: str) -> Finding:
    """Check that a local model is whole."""
    if files.problems:
        more = f" and {len(files.problems) - 3} more" if len(files.problems) > 3 else ""
        return Finding(
            "model",
            "FAIL",
            f"{files.path}: {'; '.join(files.problems[:3])}{more}",
            f"download {source} again into the volume (the warm-up job does: values "
            "`modelCache.warmUp`), and mount it in this init container too",
        )
    return Finding("model", "OK", f"{files.path} ({human_bytes(files.weight_bytes)} of weights)")


def model_hub(
    name: str, cached: probes.ModelFiles | None, offline: bool, status: int | None, error: str,
    has_token: bool,
) -> Finding:  # fmt: skip
    """Check that a model of the hub is in the cache, or can be downloaded.

    Args:
        cached: its folder in the cache, if there is one.
        offline: HF_HUB_OFFLINE.
        status, error: the hub's answer; it is not asked if `offline`.
    """
    if cached is not None and not cached.problems:
        return Finding("model", "OK", f"{name} is in the cache ({cached.path})")
    if offline:
        why = "; ".join(cached.problems[:3]) if cached else f"{name} is not in it"
        return Finding(
            "model",
            "FAIL",
            f"HF_HUB_OFFLINE is set, and the cache is not complete: {why}",
            "run the warm-up job with a network (values `modelCache.warmUp`), mount its volume "
            "at HF_HOME, or remove HF_HUB_OFFLINE",
        )
    if status is None:
        return Finding(
            "model",
            "FAIL",
            f"the hub does not answer: {error}",
            "let the pods reach it (NetworkPolicy, proxy: HTTPS_PROXY), name a mirror in "
            "HF_ENDPOINT, or put the model on a volume (values `config.model`)",
        )
    if status in (401, 403):
        token = "the token has no access to it" if has_token else "no token is set"
        return Finding(
            "model",
            "FAIL",
            f"the hub refuses {name} (HTTP {status}): it is gated, private or misspelt; {token}",
            "accept the model's terms on the hub, and give a token that may read it (values "
            "`modelCache.tokenSecret`, as HF_TOKEN)",
        )
    if status == 404:
        return Finding("model", "FAIL", f"the hub has no {name}", "correct model.source")
    if status >= 400:
        remedy = "wait and let the pod try again; name a mirror in HF_ENDPOINT if it stays so"
        return Finding("model", "WARN", f"the hub answers HTTP {status} for {name}", remedy)
    return Finding("model", "OK", f"{name} can be downloaded")


def model_room(
    name: str, weight_bytes: int | None, room_bytes: int | None, there_bytes: int
) -> Finding:
    """Check that a model can be kept where it is downloaded to.

    Args:
        weight_bytes: of the model, if the hub tells.
        room_bytes: for more of it, if that is known.
        there_bytes: of it that an earlier download has left.
    """
    size = f" ({human_bytes(weight_bytes)} of weights)" if weight_bytes else ""
    if not weight_bytes or room_bytes is None or weight_bytes <= room_bytes + there_bytes:
        return Finding("model", "OK", f"{name} can be downloaded{size}")
    return Finding(
        "model",
        "FAIL",
        f"{name} has {human_bytes(weight_bytes)} of weights, and its volume room for "
        f"{human_bytes(room_bytes + there_bytes)}: the pod would be evicted, or its disk full",
        f"raise values `modelCache.size` to {gib(weight_bytes + SPARE_MODEL_BYTES)} or more; in a "
        "folder of the node or a claim of your own, make room",
    )


def gib(size_bytes: int) -> str:
    """Return a size as a Kubernetes quantity, rounded up: `3Gi`."""
    return f"{-(-size_bytes // 2**30)}Gi"
