"""What `headrace doctor` concludes about a machine from what it measured: level and remedy."""

from pathlib import Path

import pytest

from headrace.cli import probes
from headrace.cli.doctor import Finding, command, left_out, machine
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


GRANITE = {"architectures": ["Granite"], "layer_types": ["mamba"], "mamba_chunk_size": 256}


def test_a_models_files_tell_what_engines_will_run_without() -> None:
    found = left_out.expected(LAPTOP, LAPTOP.roles().values(), GRANITE)
    assert [f.level for f in found] == ["WARN", "WARN"]
    assert "prefix cache" in found[0].found and "Mamba-2" in found[0].found
    assert "store (the model of this configuration): Granite has layers" in found[1].found
    assert "store.enabled: false" in found[1].remedy


def test_what_a_configuration_or_a_device_rules_out_is_not_expected() -> None:
    found = left_out.expected(WITHOUT_STORE, WITHOUT_STORE.roles().values(), GRANITE)
    assert ["prefix cache" in f.found for f in found] == [True]
    [one] = left_out.expected(GPU, GPU.roles().values(), GRANITE)
    assert one.found.startswith("store")
    assert left_out.expected(LAPTOP, LAPTOP.roles().values(), None) == []
    assert left_out.expected(LAPTOP, LAPTOP.roles().values(), {}) == []


def test_running_apps_tell_what_their_engines_run_without() -> None:
    why = {"left_out": {"remote_prefill": "the weights are a pickle"}}
    replicas = [{"role": "prefill", **why}, {"role": "decode", **why}, {"role": "decode", **why}]
    found = left_out.running({"a": replicas, "b": [{"role": "decode"}], "c": None})
    assert [f.level for f in found] == ["WARN", "WARN"]
    assert found[0].found == 'remote prefill ("a", decode and prefill): the weights are a pickle'
    assert found[1].found == '"c" does not answer' and "--name c" in found[1].remedy
    assert [f.level for f in left_out.running({"b": [{"left_out": {}}]})] == ["OK"]
    assert left_out.running({}) == []


def test_what_is_left_out_is_told_by_model() -> None:
    found = left_out.expected(LAPTOP, LAPTOP.roles().values(), GRANITE, "small")
    assert found and all("(models.small)" in one.found for one in found)
    replicas = [
        {"role": "decode", "model": "a", "left_out": {"store": "no"}},
        {"role": "prefill", "model": "b", "left_out": {"store": "no"}},
    ]
    found = left_out.running({"app": replicas})
    assert [one.found for one in found] == [
        'store ("app", a, decode): no',
        'store ("app", b, prefill): no',
    ]


def test_a_models_configuration_is_read_or_none(tmp_path: Path) -> None:
    assert probes.model_config(None) is None and probes.model_config(tmp_path) is None
    file = tmp_path / "config.json"
    for text, wanted in (("[1]", None), ("{", None), ('{"a": 1}', {"a": 1})):
        file.write_text(text)
        assert probes.model_config(tmp_path) == wanted


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
