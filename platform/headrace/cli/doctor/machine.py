"""The checks of the machine on which `headrace up` would start an app.

`probes` measures. The functions here decide, on plain values, what a measurement means.
"""

from __future__ import annotations

from headrace.cli import probes
from headrace.cli.console import human_bytes
from headrace.cli.doctor import left_out
from headrace.cli.doctor.finding import Check, Finding, Level
from headrace.config import HeadraceConfig
from headrace_kvstore.protocol.address import host_port

# The versions in requirements/*.lock, with which Headrace is tested.
TESTED = {"ray": "2.60.0", "vllm": "0.32.0", "nixl": "1.3.2"}
ENGINE_OVERHEAD_BYTES = 2 * 2**30  # libraries, weights of a small model and buffers, per engine
CONTROL_BYTES = 2**30
"""Ray, Serve's controller, the gateway and the StoreNode. A laptop's app takes 7.7 GiB in all, of
which 8.0 are predicted (SmolLM2-135M, AMD EPYC)."""
MIN_OPEN_FILES = 4096


def checks(config: HeadraceConfig) -> list[Check]:
    """Return all checks, in order."""
    return [
        ("python", lambda: [python(probes.python_version())]),
        ("packages", lambda: packages(probes.package_versions())),
        ("torch", lambda: [torch(probes.torch_import())]),
        ("memory", lambda: [memory(probes.available_memory_bytes(), config)]),
        ("/dev/shm", lambda: [shm(probes.shm_free_bytes(), config)]),
        ("open files", lambda: [open_files(*probes.open_file_limits())]),
        ("ports", lambda: [port(config, *probes.port(config))]),
        ("nixl", lambda: [nixl(probes.nixl_plugins())]),
        ("gpus", lambda: [gpus(probes.gpus(), config)]),
        ("rdma", lambda: [rdma(probes.rdma_devices(), probes.gpus())]),
        ("model", lambda: [model(*probes.model(name)) for name in models_by_name(config)]),
        ("left out", lambda: _left_out(config)),
        ("state", lambda: [leftovers(probes.dead_instances())]),
    ]


def models_by_name(config: HeadraceConfig) -> list[str]:
    """Return the models whose files are found by their name: those without a `source`; of a single
    model, its name in any case."""
    models = list(config.served_models().values())
    named = [one.model.id for one in models if one.model.source is None]
    return [config.model.id] if len(models) == 1 else named


def python(version: tuple[int, int]) -> Finding:
    """Check for Python 3.11 or newer."""
    found = f"{version[0]}.{version[1]}"
    if version < (3, 11):
        return Finding("python", "FAIL", found, "install Python 3.11 or newer")
    return Finding("python", "OK", found)


def packages(versions: dict[str, str | None]) -> list[Finding]:
    """Check that Ray, vLLM and NIXL are installed, in the versions that Headrace is tested with."""
    findings = []
    for name, wanted in TESTED.items():
        found = versions.get(name)
        if found is None:
            remedy = "make install" if name == "ray" else "pip install 'headrace[cpu]' or [gpu]"
            findings.append(Finding(name, "FAIL", "not installed", remedy))
        elif found.split("+")[0] != wanted:
            remedy = f"Headrace is tested with {wanted}; reinstall from the lock if something fails"
            findings.append(Finding(name, "WARN", found, remedy))
        else:
            findings.append(Finding(name, "OK", found))
    return findings


def torch(result: tuple[str | None, str]) -> Finding:
    """Check that torch imports, in a process of its own; `result` is (version or None, error)."""
    version, error = result
    if version is None:
        return Finding(
            "torch", "FAIL", error, "make install; the build of torch must match this machine"
        )
    return Finding("torch", "OK", version)


def needed_memory_bytes(config: HeadraceConfig) -> int:
    """Return an estimate of the memory for engines, KV store, Ray and the gateway.

    The weights are not in it.
    """
    engines = sum(
        role.replicas * ((role.kv_cache_bytes or 0) + ENGINE_OVERHEAD_BYTES)
        for role in config.all_roles()
    )
    store = int(config.store.dram_gb * 2**30) if config.store.enabled else 0
    return engines + store + CONTROL_BYTES


def memory(available_bytes: int, config: HeadraceConfig) -> Finding:
    """Check for enough memory for engines, KV store, Ray and the gateway."""
    needed = needed_memory_bytes(config)
    found = f"{human_bytes(available_bytes)} available, about {human_bytes(needed)} needed"
    if available_bytes < needed:
        level: Level = "FAIL" if available_bytes < needed // 2 else "WARN"
        return Finding("memory", level, found, "stop other programs, or lower kv_cache_gb")
    return Finding("memory", "OK", found)


def shm(free_bytes: int, config: HeadraceConfig) -> Finding:
    """Check for enough of /dev/shm for the KV store, Ray's object store and the engines' queues."""
    held = config.ray.object_store_bytes
    if config.store.enabled:
        held += int(config.store.dram_gb * 2**30)
    wanted = held + 256 * 2**20
    found = f"{human_bytes(free_bytes)} free"
    if free_bytes < held:
        size = human_bytes(wanted)
        remedy = f"give /dev/shm at least {size} (docker run --shm-size=2g), or lower "
        return Finding("/dev/shm", "FAIL", found, remedy + "store.dram_gb, ray.object_store_bytes")
    if free_bytes < wanted:
        return Finding("/dev/shm", "WARN", found, f"{human_bytes(wanted)} or more is better")
    return Finding("/dev/shm", "OK", found)


def open_files(soft: int, hard: int) -> Finding:
    """Check for enough file descriptors for Ray, the engines and the streams."""
    if soft < MIN_OPEN_FILES:
        how = f"ulimit -n {min(hard, 65536)}" if hard > soft else "raise nofile in limits.conf"
        return Finding("open files", "WARN", f"limit {soft}", how)
    return Finding("open files", "OK", f"limit {soft}")


def port(config: HeadraceConfig, free: bool, holder: str | None) -> Finding:
    """Check that the gateway's port is free, or that a running instance uses it."""
    found = host_port(config.gateway.host, config.gateway.port or 0)
    if holder is not None:
        return Finding("port", "OK", f'{found} is in use by the running instance "{holder}"')
    if not free:
        return Finding("port", "WARN", f"{found} is in use", "headrace up --set gateway.port=0")
    return Finding("port", "OK", f"{found} is free")


def nixl(result: tuple[list[str], str]) -> Finding:
    """Check that NIXL can create an agent with UCX; `result` is (plugins, the error)."""
    plugins, error = result
    if not plugins:
        remedy = "reinstall nixl; without it, every prefill is local"
        return Finding("nixl transports", "FAIL", error or "no plugin", remedy)
    if "UCX" not in plugins:
        remedy = "reinstall nixl: KV moves over UCX"
        return Finding("nixl transports", "FAIL", ", ".join(plugins), remedy)
    return Finding("nixl transports", "OK", ", ".join(plugins))


def gpus(found: list[str], config: HeadraceConfig) -> Finding:
    """Check for the GPUs that the configuration needs."""
    wanted = sum(role.replicas * role.gpus for role in config.all_roles())
    words = ", ".join(found) or "none"
    if wanted > len(found):
        remedy = f"the configuration asks for {wanted}; add machines, or use --preset laptop"
        return Finding("GPUs", "WARN", words, remedy)
    remedy = "headrace up --preset gpu-node would use them" if len(found) >= 2 > wanted else ""
    return Finding("GPUs", "OK", words if found else "none (engines run on the CPU)", remedy)


def rdma(devices: list[str], found_gpus: list[str]) -> Finding:
    """Check for RDMA, for KV between machines; without it, UCX uses TCP."""
    if devices:
        return Finding("RDMA", "OK", ", ".join(devices))
    if found_gpus:
        remedy = "on one machine none is needed; between machines, TCP is many times slower"
        return Finding("RDMA", "WARN", "no device", remedy)
    return Finding("RDMA", "OK", "no device (shared memory and TCP are used)")


def model(name: str, folder: str | None, error: str) -> Finding:
    """Check that the default model is in the cache, and that its checksums match."""
    if folder is None:
        return Finding("model", "WARN", f"{name} is not downloaded", f"headrace model fetch {name}")
    if error:
        return Finding("model", "FAIL", f"{folder}: {error}", f"headrace model fetch {name}")
    return Finding("model", "OK", folder)


def _left_out(config: HeadraceConfig) -> list[Finding]:
    expected = []
    for key, each in config.served_models().items():
        model_config = probes.model_config(probes.model_folder(each.model.id, each.model.source))
        expected += left_out.expected(each, each.roles().values(), model_config, key)
    return expected + left_out.running(probes.running_replicas())


def leftovers(names: list[str]) -> Finding:
    """Check for instances that ended without cleaning up."""
    if names:
        return Finding(
            "instances",
            "WARN",
            f"ended without cleaning up: {', '.join(names)}",
            "headrace down --all",
        )
    return Finding("instances", "OK", "none ended without cleaning up")
