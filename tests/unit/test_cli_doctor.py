"""What `headrace doctor` concludes about a machine from what it measured: level and remedy."""

import pytest

from headrace.cli.doctor import Finding, command, machine
from headrace.config import load_config

LAPTOP = load_config()
WITHOUT_STORE = load_config(overrides=["store.enabled=false"])
GPU = load_config(preset="gpu-node")
GIB = 2**30


@pytest.mark.parametrize(
    ("finding", "level", "remedy"),
    [
        (machine.python((3, 10)), "FAIL", "install Python 3.11"),
        (machine.python((3, 12)), "OK", ""),
        (machine.torch((None, "no module")), "FAIL", "make install"),
        (machine.torch(("2.13.0+cpu", "")), "OK", ""),
        (machine.memory(20 * GIB, LAPTOP), "OK", ""),
        (machine.memory(4 * GIB, LAPTOP), "WARN", "lower kv_cache_gb"),
        (machine.memory(1 * GIB, LAPTOP), "FAIL", "lower kv_cache_gb"),
        (machine.shm(2 * GIB, LAPTOP), "OK", ""),
        (machine.shm(GIB, LAPTOP), "FAIL", "--shm-size=2g"),
        (machine.shm(GIB, WITHOUT_STORE), "OK", ""),
        (machine.shm(GIB + 250 * 10**6, LAPTOP), "WARN", "is better"),
        (machine.open_files(1024, 65536), "WARN", "ulimit -n 65536"),
        (machine.open_files(1024, 1024), "WARN", "limits.conf"),
        (machine.open_files(65536, 65536), "OK", ""),
        (machine.port(LAPTOP, True, None), "OK", ""),
        (machine.port(LAPTOP, False, None), "WARN", "gateway.port=0"),
        (machine.port(LAPTOP, False, "default"), "OK", ""),
        (machine.nixl((["POSIX", "UCX"], "")), "OK", ""),
        (machine.nixl(([], "crashed (signal 11)")), "FAIL", "reinstall nixl"),
        (machine.nixl((["POSIX"], "")), "FAIL", "UCX"),
        (machine.gpus([], LAPTOP), "OK", ""),
        (machine.gpus(["H200"], GPU), "WARN", "asks for 2"),
        (machine.gpus(["H200", "H200"], LAPTOP), "OK", "gpu-node"),
        (machine.rdma(["mlx5_0"], []), "OK", ""),
        (machine.rdma([], ["H200"]), "WARN", "TCP"),
        (machine.rdma([], []), "OK", ""),
        (machine.model("m", None, ""), "WARN", "headrace model fetch m"),
        (machine.model("m", "/m", "is damaged"), "FAIL", "headrace model fetch m"),
        (machine.model("m", "/m", ""), "OK", ""),
        (machine.leftovers(["a"]), "WARN", "headrace down --all"),
        (machine.leftovers([]), "OK", ""),
    ],
)
def test_each_finding_has_its_level_and_remedy(finding: Finding, level: str, remedy: str) -> None:
    assert finding.level == level
    assert remedy in finding.remedy
    assert bool(finding.remedy) or level == "OK"


def test_versions_are_compared_with_the_tested_ones() -> None:
    found = machine.packages({"ray": "2.60.0", "vllm": "0.29.0+cpu", "nixl": None})
    assert [(f.what, f.level) for f in found] == [("ray", "OK"), ("vllm", "WARN"), ("nixl", "FAIL")]


def test_a_probe_that_breaks_is_a_finding(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def look() -> list[Finding]:
        raise RuntimeError("no such file")

    monkeypatch.setattr(machine, "checks", lambda config: [("thing", look)])
    assert command.check_machine(LAPTOP, as_json=False) == 0
    assert "could not be checked: no such file" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("levels", "said"),
    [
        ("", "Ready"),
        ("WARN", "Ready, with 1 warning"),
        ("FAIL", "1 problem"),
        ("FAIL FAIL WARN WARN", "2 problems, 2 warnings"),
    ],
)
def test_the_last_line_says_whether_the_machine_is_ready(
    levels: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = [Finding("x", level, "y") for level in levels.split()]  # type: ignore[arg-type]
    monkeypatch.setattr(machine, "checks", lambda config: [("x", lambda: found)])
    command.check_machine(LAPTOP, as_json=False)
    assert capsys.readouterr().out.splitlines()[-1] == said


def test_a_failure_is_exit_1(monkeypatch: pytest.MonkeyPatch) -> None:
    fail = Finding("x", "FAIL", "y", "z")
    monkeypatch.setattr(machine, "checks", lambda config: [("x", lambda: [fail])])
    assert command.check_machine(LAPTOP, as_json=True) == 1
