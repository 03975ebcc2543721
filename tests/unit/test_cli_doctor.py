"""What `headrace doctor` concludes from what it measured: level and remedy."""

import pytest

from headrace.cli import doctor
from headrace.config import load_config

LAPTOP = load_config()
WITHOUT_STORE = load_config(overrides=["store.enabled=false"])
GPU = load_config(preset="gpu-node")
GIB = 2**30


@pytest.mark.parametrize(
    ("finding", "level", "remedy"),
    [
        (doctor.python((3, 10)), "FAIL", "install Python 3.11"),
        (doctor.python((3, 12)), "OK", ""),
        (doctor.torch((None, "no module")), "FAIL", "make install"),
        (doctor.torch(("2.13.0+cpu", "")), "OK", ""),
        (doctor.memory(20 * GIB, LAPTOP), "OK", ""),
        (doctor.memory(4 * GIB, LAPTOP), "WARN", "lower kv_cache_gb"),
        (doctor.memory(1 * GIB, LAPTOP), "FAIL", "lower kv_cache_gb"),
        (doctor.shm(2 * GIB, LAPTOP), "OK", ""),
        (doctor.shm(GIB, LAPTOP), "FAIL", "--shm-size=2g"),
        (doctor.shm(GIB, WITHOUT_STORE), "OK", ""),
        (doctor.shm(GIB + 250 * 10**6, LAPTOP), "WARN", "is better"),
        (doctor.open_files(1024, 65536), "WARN", "ulimit -n 65536"),
        (doctor.open_files(1024, 1024), "WARN", "limits.conf"),
        (doctor.open_files(65536, 65536), "OK", ""),
        (doctor.port(LAPTOP, True, None), "OK", ""),
        (doctor.port(LAPTOP, False, None), "WARN", "gateway.port=0"),
        (doctor.port(LAPTOP, False, "default"), "OK", ""),
        (doctor.nixl((["POSIX", "UCX"], "")), "OK", ""),
        (doctor.nixl(([], "crashed (signal 11)")), "FAIL", "reinstall nixl"),
        (doctor.nixl((["POSIX"], "")), "FAIL", "UCX"),
        (doctor.gpus([], LAPTOP), "OK", ""),
        (doctor.gpus(["H200"], GPU), "WARN", "asks for 2"),
        (doctor.gpus(["H200", "H200"], LAPTOP), "OK", "gpu-node"),
        (doctor.rdma(["mlx5_0"], []), "OK", ""),
        (doctor.rdma([], ["H200"]), "WARN", "TCP"),
        (doctor.rdma([], []), "OK", ""),
        (doctor.model("m", None, ""), "WARN", "headrace model fetch m"),
        (doctor.model("m", "/m", "is damaged"), "FAIL", "headrace model fetch m"),
        (doctor.model("m", "/m", ""), "OK", ""),
        (doctor.leftovers(["a"]), "WARN", "headrace down --all"),
        (doctor.leftovers([]), "OK", ""),
    ],
)
def test_each_finding_has_its_level_and_remedy(
    finding: doctor.Finding, level: str, remedy: str
) -> None:
    assert finding.level == level
    assert remedy in finding.remedy
    assert bool(finding.remedy) or level == "OK"


def test_versions_are_compared_with_the_tested_ones() -> None:
    found = doctor.packages({"ray": "2.60.0", "vllm": "0.32.0+cpu", "nixl": None})
    assert [(f.what, f.level) for f in found] == [("ray", "OK"), ("vllm", "WARN"), ("nixl", "FAIL")]


def test_a_probe_that_breaks_is_a_finding(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def look() -> list[doctor.Finding]:
        raise RuntimeError("no such file")

    monkeypatch.setattr(doctor, "checks", lambda config: [("thing", look)])
    assert doctor.doctor(as_json=False) == 0
    assert "could not be checked: no such file" in capsys.readouterr().out


def test_a_failure_is_exit_1(monkeypatch: pytest.MonkeyPatch) -> None:
    fail = doctor.Finding("x", "FAIL", "y", "z")
    monkeypatch.setattr(doctor, "checks", lambda config: [("x", lambda: [fail])])
    assert doctor.doctor(as_json=True) == 1
