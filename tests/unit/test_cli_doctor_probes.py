"""What the probes of `headrace doctor` make of the machine's own words, and which levels follow."""

import os
import re
from pathlib import Path

import pytest
import yaml

from headrace.cli import probes
from headrace.cli.doctor import Finding, hardware, storage, surroundings
from headrace.cli.probes import disk, gpu, pod

GIB = 2**30
H100 = probes.Gpu("H100", 0, 80 * GIB)


@pytest.mark.parametrize(
    ("finding", "level", "remedy"),
    [
        (hardware.driver("13.0", probes.Driver(None, None, "")), "FAIL", "same GPU resources"),
        (hardware.driver("13.0", probes.Driver("580.9", None, "x")), "FAIL", "compute,utility"),
        (hardware.driver("13.0", probes.Driver("580.9", (13, 0), "")), "OK", ""),
        (hardware.driver("12.8", probes.Driver("590.1", (13, 2), "")), "OK", ""),
        (hardware.driver("14.0", probes.Driver("590.1", (13, 2), "")), "FAIL", "driver.version"),
        (hardware.gpus([], "no nvidia-smi", ["nvidia0"], 1)[0], "OK", ""),
        (hardware.gpus([], "no nvidia-smi", [], 1)[0], "FAIL", "GPU count"),
        (hardware.gpus([H100, H100], "", [], 1)[0], "OK", ""),
        (hardware.rdma(["mlx5_0"], ["uverbs0"], True, None, ["eth0"]), "OK", ""),
        (hardware.rdma(["mlx5_0"], ["uverbs0"], True, "mlx5_0:1", ["eth0"]), "OK", ""),
        (hardware.rdma(["mlx5_0"], [], True, None, ["eth0"]), "FAIL", "decode.resources"),
        (hardware.rdma(["mlx5_0"], [], False, None, ["eth0"]), "WARN", "device plugin"),
        (hardware.rdma([], [], False, "eth0", ["eth0"]), "OK", ""),
        (hardware.rdma([], [], False, "eth1", ["eth0"]), "FAIL", "leave UCX_NET_DEVICES out"),
        (hardware.memlock(65536, False, True), "FAIL", "IPC_LOCK"),
        (hardware.memlock(2 * GIB, False, True), "WARN", "IPC_LOCK"),
        (hardware.memlock(65536, False, False), "OK", ""),
        (hardware.memlock(65536, True, True), "OK", ""),
        (hardware.memlock(None, False, True), "OK", ""),
        (hardware.nixl(["UCX"], "", None), "OK", ""),
        (hardware.nixl(["LIBFABRIC"], "", None), "OK", ""),
        (hardware.nixl(["POSIX"], "", "/p"), "FAIL", "NIXL_PLUGIN_DIR"),
        (hardware.nixl([], "crashed (signal 11)", None), "FAIL", "image"),
        (storage.shm(64 * 2**20, GIB, 0), "FAIL", "sizeLimit 2Gi"),
        (storage.shm(GIB + 1, GIB, 0), "WARN", "the chart does"),
        (storage.shm(2 * GIB, GIB, 0), "OK", ""),
        (storage.memory(None, GIB), "OK", ""),
        (storage.memory(GIB, 2 * GIB), "FAIL", "2Gi or more"),
        (storage.memory(9 * GIB, 10 * GIB), "WARN", "limits.memory"),
        (storage.memory(10 * GIB, 10 * GIB), "OK", ""),
        (storage.nvme(probes.Folder("/k", "", "ext4", GIB, 0, True), GIB), "OK", ""),
        (storage.nvme(probes.Folder("/k", "", "ext4", 0, GIB, True), GIB), "OK", ""),
        (storage.nvme(probes.Folder("/k", "", "ext4", GIB, 0, False), GIB), "WARN", "O_DIRECT"),
        (storage.nvme(probes.Folder("/k", "", "overlay", GIB, 0, True), GIB), "WARN", "hostPath"),
        (storage.nvme(probes.Folder("/k", "", "tmpfs", GIB, 0, True), GIB), "WARN", "volume"),
        (storage.nvme(probes.Folder("/k", "", "nfs4", GIB, 0, True), GIB), "WARN", "object tier"),
        (storage.nvme(probes.Folder("/k", "", "ext4", GIB, 0, True), 3 * GIB), "FAIL", "to 1"),
        (storage.model_hub("a/b", None, False, 404, "", False), "FAIL", "model.source"),
        (storage.model_hub("a/b", None, False, 503, "", False), "WARN", "HF_ENDPOINT"),
        (surroundings.user(probes.User(0, "root")), "WARN", "runAsNonRoot"),
        (surroundings.user(probes.User(1000, "headrace")), "OK", ""),
        (surroundings.open_files(1024, 1048576), "OK", ""),
        (surroundings.open_files(8192, 8192), "WARN", "LimitNOFILE"),
        (surroundings.open_files(1024, 1024), "FAIL", "LimitNOFILE"),
        (surroundings.open_files(1048576, 1048576), "OK", ""),
        (surroundings.threads(None), "OK", ""),
        (surroundings.threads(100), "FAIL", "podPidsLimit"),
        (surroundings.threads(2048), "WARN", "podPidsLimit"),
        (surroundings.ray_token("disabled", "none"), "WARN", "authOptions"),
    ],
)  # fmt: skip
def test_each_finding_has_its_level_and_remedy(finding: Finding, level: str, remedy: str) -> None:
    assert finding.level == level, finding
    assert remedy in finding.remedy
    assert bool(finding.remedy) == (level != "OK")


def test_remedies_name_values_that_the_chart_has() -> None:
    root = Path(__file__).resolve().parents[2]
    chart = root / "helm" / "headrace" / "values.yaml"
    if not chart.is_file():
        pytest.skip("there is no chart in this tree")
    values = yaml.safe_load(chart.read_text("utf-8"))
    texts = [p.read_text("utf-8") for p in (root / "platform/headrace/cli/doctor").glob("*.py")]
    named = {n for text in texts for n in re.findall(r"values\s*\"?\s*\"?`([\w.]+)`", text)}
    assert len(named) > 5
    for name in sorted(named):
        place = values
        for key in name.split("."):
            assert isinstance(place, dict) and key in place, f"the chart has no value {name}"
            place = place[key]


def test_nvidia_smis_listing() -> None:
    text = "NVIDIA H100 80GB HBM3, 4, 81559\nGB10, Grace, [N/A], [N/A]\n\n"
    assert gpu.parse_listing(text) == [
        probes.Gpu("NVIDIA H100 80GB HBM3", 4 * 2**20, 81559 * 2**20),
        probes.Gpu("GB10, Grace", 0, 0),
    ]


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5", "550.54.15"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  R", "580.95.05"),
        ("nothing", None),
    ],
)
def test_the_drivers_version(tmp_path: Path, text: str, version: str | None) -> None:
    (tmp_path / "version").write_text(text)
    assert probes.driver_version(tmp_path / "version") == version
    assert probes.driver_version(tmp_path / "absent") is None


def test_gpu_device_files(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia11", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    assert probes.gpu_nodes(tmp_path) == ["nvidia0", "nvidia11"]


def test_limits_of_both_versions_of_cgroups(tmp_path: Path) -> None:
    assert pod.memory_limit_bytes(tmp_path) is None
    (tmp_path / "memory").mkdir()
    file = tmp_path / "memory" / "memory.limit_in_bytes"
    file.write_text("9223372036854771712\n")
    assert pod.memory_limit_bytes(tmp_path) is None
    file.write_text("4096\n")
    assert pod.memory_limit_bytes(tmp_path) == 4096
    (tmp_path / "pids.max").write_text("2048\n")
    assert pod.pids_limit(tmp_path) == 2048


def test_the_capability_ipc_lock(tmp_path: Path) -> None:
    for mask, has in (("0000000000004000", True), ("00000000a80425fb", False)):
        (tmp_path / "status").write_text(f"Name:\tx\nCapEff:\t{mask}\n")
        assert pod.has_ipc_lock(tmp_path / "status") == has


def test_the_innermost_mount_counts(tmp_path: Path) -> None:
    inner = tmp_path / "a b"
    inner.mkdir()
    shown = str(inner).replace(" ", "\\040")
    (tmp_path / "mountinfo").write_text(
        "1 0 0:1 / / rw - overlay overlay rw\n"
        f"2 1 0:2 / {shown} rw,noatime shared:1 - xfs /dev/nvme0n1 rw\n"
        f"3 1 0:3 / {shown}c rw - tmpfs none rw\n"
    )
    assert disk.file_system(inner, tmp_path / "mountinfo") == "xfs"
    assert disk.file_system(tmp_path, tmp_path / "mountinfo") == "overlay"


def test_folders_that_do_not_exist_yet_are_judged_by_their_parents(tmp_path: Path) -> None:
    assert probes.write_error(tmp_path / "a" / "b") == ""
    assert "/proc" in probes.write_error(Path("/proc/a/b"))
    assert not list(tmp_path.iterdir())


def test_where_folders_are_looked_for() -> None:
    plain = probes.needed_folders({"HOME": "/home/u"})
    assert plain["HF_HOME"] == Path("/home/u/.cache/huggingface")
    assert plain["TMPDIR"] == Path("/tmp")
    named = probes.needed_folders({"XDG_CACHE_HOME": "/c", "TMPDIR": "/t"})
    assert named["VLLM_CACHE_ROOT"] == Path("/c/vllm") and named["TMPDIR"] == Path("/t")


def test_the_kubernetes_api() -> None:
    assert probes.kubernetes_url({}) is None
    env = {"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT": "443"}
    assert probes.kubernetes_url(env) == "https://[fd00::1]:443/version"


def test_a_tokens_place(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("hf_file\n")
    assert probes.hub_token({"HF_HOME": str(tmp_path)}) == "hf_file"
    assert probes.hub_token({"HF_HOME": str(tmp_path), "HF_TOKEN": "hf_env"}) == "hf_env"
    assert probes.hub_token({"HOME": os.devnull}) is None


def test_the_way_from_disk_to_gpu_is_told_with_what_a_shorter_one_lacks(tmp_path: Path) -> None:
    assert not gpu.gds_driver(tmp_path)
    (tmp_path / "nvidia_fs").mkdir()
    whole = storage.to_gpu(["GDS_MT", "UCX"], gpu.gds_driver(tmp_path), "xfs")
    assert "each engine measures it against reads through registered host memory" in whole.found
    lacking = storage.to_gpu(["UCX"], False, "overlay").found
    for part in ("no plugin GDS_MT", "nvidia_fs is not loaded", "overlay is not ext4 or xfs"):
        assert part in lacking
