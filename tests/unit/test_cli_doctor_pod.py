"""Faults planted in a pod, one by one and for real where a machine allows: each is found by
`headrace doctor --cluster`, stops the pod, and its remedy is named."""

import json
import os
import resource
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from click.testing import Result
from typer.testing import CliRunner

from headrace.cli import probes
from headrace.cli.console import CliError
from headrace.cli.doctor import Finding, doctor, finding, pod
from headrace.cli.probes import pod as pod_probes
from headrace.config import HeadraceConfig
from tests.support import doctor_pod
from tests.support.doctor_pod import GIB, HERE, Answer, look, stops

model, server = doctor_pod.model, doctor_pod.server


def test_unequal_hash_seeds() -> None:
    found = look("hash seed", "decode.env.PYTHONHASHSEED=7")
    stops(found, "0 in prefill, 7 in decode", "remove PYTHONHASHSEED")


def test_a_random_hash_seed() -> None:
    both = [f"{role}.env.PYTHONHASHSEED=random" for role in ("prefill", "decode")]
    stops(look("hash seed", *both), '"random"', "whole number")


def roles(prefill: int, decode: int) -> list[str]:
    sizes = {"prefill": prefill, "decode": decode}
    return [f"{r}.engine.tensor_parallel_size={n}" for r, n in sizes.items()] + [
        f"{r}.gpus={n}" for r, n in sizes.items()
    ]


def test_tensor_parallel_sizes_that_do_not_divide() -> None:
    stops(look("parallelism", *roles(2, 3)), "neither divides", "multiple of the other")
    assert [f.level for f in look("parallelism", *roles(2, 4))] == ["OK"]


def test_more_ranks_in_prefill_than_kv_heads(model: Path) -> None:
    found = look("parallelism", f"model.source={model}", *roles(4, 1))
    stops(found, "2 KV heads", "at most 2")
    assert [f.level for f in look("parallelism", f"model.source={model}", *roles(1, 4))] == ["OK"]


def test_a_layout_in_one_role_only() -> None:
    found = look("environment", "decode.env.VLLM_KV_CACHE_LAYOUT=NHD")
    stops(found, "VLLM_KV_CACHE_LAYOUT is not set in prefill", "prefill.env and decode.env")


def test_a_port_that_is_taken() -> None:
    with socket.create_server(("0.0.0.0", 0)) as taken:
        port = taken.getsockname()[1]
        found = look("ports", f"gateway.port={port}", role="gateway")
    stops(found, f"{port} in use", "hostNetwork")


@pytest.mark.parametrize(("skew_s", "level"), [(0, "OK"), (30, "WARN"), (-3600, "FAIL")])
def test_a_clock_that_is_wrong(server: tuple[str, type[Answer]], skew_s: float, level: str) -> None:
    server[1].skew_s = skew_s
    (found,) = look("clock", clock_url=server[0])
    assert found.level == level, found
    assert ("chrony" in found.remedy) == (level != "OK")


def test_an_api_that_does_not_answer_is_no_reason_to_stop() -> None:
    with socket.create_server((HERE, 0)) as taken:
        port = taken.getsockname()[1]
    (found,) = look("clock", clock_url=f"http://{HERE}:{port}/")
    assert found.level == "WARN"


def test_no_ray_token(tmp_path: Path) -> None:
    env = {"RAY_AUTH_MODE": "token", "HOME": str(tmp_path)}
    stops(look("Ray token", env=env), "auth_token", "Secret")
    (tmp_path / "empty").write_text("\n")
    env["RAY_AUTH_TOKEN_PATH"] = str(tmp_path / "empty")
    stops(look("Ray token", env=env), "is empty", "Secret")
    assert [f.level for f in look("Ray token", env=env | {"RAY_AUTH_TOKEN": "t"})] == ["OK"]


def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    # Not even root makes files in /proc.
    env = {"HOME": str(tmp_path), "TMPDIR": str(tmp_path), "HF_HOME": "/proc/self/hub"}
    stops(look("writable folders", env=env), "HF_HOME cannot be written", "emptyDir")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("place", ["absent", "file"])
def test_an_nvme_folder_that_is_none(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").touch()
    folder = tmp_path / place
    found = look("NVMe", f"store.nvme_folder={folder}")
    stops(found, str(folder), "mount the volume")


def test_an_nvme_folder_that_may_not_be_written() -> None:
    stops(look("NVMe", "store.nvme_folder=/proc/self"), "/proc/self", "fsGroup")


def test_a_disk_that_is_too_small(tmp_path: Path) -> None:
    found = look("NVMe", f"store.nvme_folder={tmp_path}", "store.nvme_gb=1000000")
    stops(found, str(tmp_path), "lower store.nvme_gb")
    assert not list(tmp_path.iterdir())


def test_memory_that_is_limited_too_tightly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "memory.max").write_text(f"{GIB}\n")
    monkeypatch.setattr(
        probes, "memory_limit_bytes", lambda: pod_probes.memory_limit_bytes(tmp_path)
    )
    stops(look("memory limit"), "1.0 GiB; about 4.2 GiB", "resources.limits.memory")
    (tmp_path / "memory.max").write_text("max\n")
    assert [f.level for f in look("memory limit")] == ["OK"]


def test_a_user_without_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pod_probes.os, "getuid", lambda: 1000910000)
    stops(look("user", env={}), "has no name", "USER")
    assert [f.level for f in look("user", env={"USER": "headrace"})] == ["OK"]


GPU = ["prefill.gpus=2", "decode.gpus=2"]
GPU += [f"{role}.engine.tensor_parallel_size=2" for role in ("prefill", "decode")]


def smi(folder: Path, text: str, status: int = 0) -> str:
    """A PATH on which nvidia-smi says `text`."""
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{text}\nEND\nexit {status}\n")
    program.chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


def test_too_few_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", smi(tmp_path, "NVIDIA H100, 4, 81559"))
    stops(look("GPUs", *GPU), "1 visible, 2 needed", "Kubernetes counts the larger")
    (found,) = look("GPUs", "prefill.gpus=1", "decode.gpus=1")
    assert found.level == "OK"


def test_a_driver_that_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", smi(tmp_path, "Failed to initialize NVML", 18))
    stops(look("GPUs", *GPU), "Failed to initialize NVML", "GPU count")


def test_gpus_that_somebody_uses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", smi(tmp_path, "NVIDIA H100, 4, 81559\nNVIDIA H100, 70000, 81559"))
    (found,) = look("GPUs", *GPU)
    assert (found.level, found.found) == ("WARN", "1 of 2 already hold up to 68.4 GiB")


def test_the_cpu_image_for_a_role_with_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "torch_cuda", lambda: None)
    stops(look("driver", *GPU), "torch is a CPU build", "gpu image")


def test_an_old_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "torch_cuda", lambda: "13.0")
    monkeypatch.setattr(probes, "cuda_driver", lambda: probes.Driver("550.54.15", (12, 4), ""))
    stops(look("driver", *GPU), "CUDA 13.0 wants driver 580", "driver.version")


def test_rdma_that_was_asked_for_and_is_not_there() -> None:
    if probes.rdma_nodes():
        pytest.skip("this machine has RDMA")
    found = [f for f in look("RDMA", expect_rdma=True) if f.what == "RDMA"]
    stops(found, "no /dev/infiniband", "device plugin's resource")


def test_a_network_card_that_is_not_there() -> None:
    found = look("RDMA", env={"UCX_NET_DEVICES": "mlx5_99:1"})
    stops(found, "mlx5_99", "leave UCX_NET_DEVICES out")


def in_child(limit: int, most: int, name: str, prefix: tuple[str, ...] = ()) -> list[Finding]:
    """What a check finds in a process with another resource limit."""
    code = (
        "import json; from dataclasses import asdict\n"
        "from headrace.cli.doctor import finding, pod\n"
        "from headrace.config import load_config\n"
        "this = pod.Pod('decode', load_config(), expect_rdma=True)\n"
        f"found = finding.run([c for c in pod.checks(this) if c[0] == {name!r}])\n"
        "print(json.dumps([asdict(f) for f in found]))"
    )
    done = subprocess.run(
        [*prefix, sys.executable, "-c", code],
        preexec_fn=lambda: resource.setrlimit(limit, (most, most)),
        capture_output=True, text=True, check=True, timeout=60,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    return [Finding(**f) for f in json.loads(done.stdout)]


def test_too_few_open_files() -> None:
    found = in_child(resource.RLIMIT_NOFILE, 1024, "open files")
    stops(found, "limit 1024", "LimitNOFILE")


def test_memory_that_cannot_be_locked() -> None:
    prefix: tuple[str, ...] = ()
    if probes.has_ipc_lock():  # root: give the right up
        if shutil.which("setpriv") is None:
            pytest.skip("setpriv (Debian: util-linux) is missing")
        prefix = ("setpriv", "--bounding-set", "-ipc_lock", "--inh-caps", "-ipc_lock")
    found = in_child(resource.RLIMIT_MEMLOCK, 65536, "RDMA", prefix)
    stops([f for f in found if f.what == "locked memory"], "64.0 KiB", "IPC_LOCK")


def test_roles_have_their_own_checks() -> None:
    config = HeadraceConfig()
    names = {r: {n for n, _ in pod.checks(pod.Pod(r, config))} for r in ("decode", "gateway")}  # type: ignore[arg-type]
    assert "NIXL" in names["decode"] and "NIXL" not in names["gateway"]
    assert "GPUs" not in names["decode"]


# The command


def run(*arguments: str) -> Result:
    """The command in this process."""
    app = typer.Typer()
    app.command()(doctor)
    return CliRunner().invoke(app, list(arguments))


MOUNTS = """
mount -t tmpfs -o size=64m none /dev/shm &&
mount -t tmpfs -o size=16m none "$1/nvme" &&
mount -t tmpfs -o ro none "$1/cache" &&
shift && ulimit -n 1024 && exec "$@"
"""


def test_a_broken_pod_stops_with_its_last_words(tmp_path: Path, model: Path) -> None:
    """A pod with a small /dev/shm, a small disk, a read-only cache and more, by real mounts."""
    apart = ("unshare", "-Urm")
    if shutil.which("unshare") is None or subprocess.run([*apart, "true"]).returncode != 0:
        pytest.skip("this machine lets nobody make namespaces (unshare, of Debian's util-linux)")
    for name in ("nvme", "cache"):
        (tmp_path / name).mkdir()
    (model / "model-00002-of-00002.safetensors").unlink()
    words = tmp_path / "termination-log"
    words.touch()
    (tmp_path / "c.yaml").write_text(
        f"model: {{source: {model}}}\n"
        f"store: {{nvme_folder: {tmp_path}/nvme, nvme_gb: 1}}\n"
        "gateway: {host: 0.0.0.0, api_keys_file: /not/mounted/here}\n"
        "decode: {env: {PYTHONHASHSEED: 5}}\n"
    )
    env = {"HF_HOME": f"{tmp_path}/cache", "RAY_AUTH_MODE": "token", "HOME": str(tmp_path)}
    env |= {"NIXL_PLUGIN_DIR": f"{tmp_path}/nvme", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [
            *apart, "sh", "-c", MOUNTS, "sh", str(tmp_path),
            sys.executable, "-m", "headrace.cli", "doctor", "--cluster", "--role", "decode",
            "-f", str(tmp_path / "c.yaml"), "--json", "--termination-log", str(words),
        ],
        capture_output=True, text=True, timeout=120, env={**os.environ, **env},
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    failed = {f["what"]: f for f in json.loads(done.stdout) if f["level"] == "FAIL"}
    wanted = {"/dev/shm", "NVMe", "writable folders", "open files", "model", "hash seed", "NIXL"}
    assert wanted | {"Ray token"} == failed.keys(), failed
    assert all(f["remedy"] for f in failed.values())
    text = words.read_text()
    assert len(text.encode()) <= finding.TERMINATION_BYTES
    assert all(f"FAIL {what}: " in text for what in failed)


def test_a_wrong_configuration_is_a_finding(tmp_path: Path) -> None:
    words = tmp_path / "termination-log"
    words.touch()
    done = run(
        "--cluster", "--set", "decode.engine.block_size=64", "--set", "store.dram_gb=0",
        "--termination-log", str(words),
    )  # fmt: skip
    assert done.exit_code == 1
    assert done.stdout.startswith("FAIL configuration: store.dram_gb: must be > 0")
    assert words.read_text() == done.stdout.strip()
    done = run("--cluster", "--set", "decode.engine.block_size=64")
    assert "decode.engine.block_size: is 64, but prefill.engine.block_size" in done.stdout


@pytest.mark.parametrize(("more", "level"), [([], "FAIL"), (["--tolerate", "Hash-Seed"], "WARN")])
def test_a_check_can_be_tolerated(more: list[str], level: str) -> None:
    unequal = ["--set", "decode.env.PYTHONHASHSEED=5"]
    done = run("--cluster", "--role", "head", "--json", *unequal, *more)
    found = {f["what"]: f for f in json.loads(done.stdout)}
    assert found["hash seed"]["level"] == level


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--cluster", "--role", "router"], "--role"),
        (["--cluster", "--peer", "nowhere"], "--peer"),
        (["--peer", "a:1"], "--peer needs --cluster"),
        (["--role", "foo"], "--role needs --cluster"),
    ],
)
def test_wrong_options_are_refused(arguments: list[str], text: str) -> None:
    done = run(*arguments)
    assert isinstance(done.exception, CliError) and done.exception.exit_code == 2
    assert text in str(done.exception)


def test_last_words_fit_and_the_worst_come_first(tmp_path: Path) -> None:
    file = tmp_path / "log"
    many = [Finding("w", "WARN", "ü" * 900, "r"), *[Finding("f", "FAIL", "ü" * 900, "r")] * 3]
    finding.leave_message(many, file)
    assert not file.exists()
    file.touch()
    finding.leave_message(many, file)
    assert len(file.read_bytes()) <= finding.TERMINATION_BYTES
    assert (
        file.read_text().startswith("FAIL f: ") and "the log of this container" in file.read_text()
    )
    finding.leave_message([Finding("x", "OK", "y")], file)
    assert finding.as_lines(many).splitlines()[0].startswith("WARN")
