"""What the command line makes of the driver process: its events, its errors, its death."""

import json
import os
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from headrace.cli import deploy, down
from headrace.cli.deploy import AppDeployment, Deletion, DeployError, Progress
from headrace.cli.state import Instance
from headrace.observability.shared_memory import ProcessId

INSTANCE = Instance(name="a", token="t", app="headrace", address="127.0.0.1:1")
NOISE = "print('Fatal: the client broke', file=sys.stderr, flush=True); "
SEGFAULT = "import os; os.kill(os.getpid(), 11)"


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch):
    """Has `code` run in the driver's place; it finds the verb in sys.argv, and `say`."""

    def be(code: str) -> None:
        start = "import json, sys\ndef say(**event): print(json.dumps(event), flush=True)\n"
        monkeypatch.setattr(deploy, "DRIVER", [sys.executable, "-c", start + code])

    return be


def progress(app_status: str, **decode: object) -> str:
    deployment = {"name": "decode", "status": "UPDATING", "running": 0, "total": 1, "message": ""}
    return (
        f"say(progress={dict(status=app_status, message='', deployments=[deployment | decode])}); "
    )


def soon() -> float:
    return time.monotonic() + 30


def test_progress_is_followed_until_the_app_runs(driver) -> None:
    order = "sys.stdin.readline(); say(connected='10.0.0.1:6379'); sys.stdin.readline(); "
    driver(order + progress("DEPLOYING") + progress("RUNNING", status="HEALTHY", running=1))
    with AppDeployment({}, None) as deploying:
        assert deploying.connect("auto", "headrace", joined=True, deadline=soon()) == (
            "10.0.0.1:6379"
        )
        seen = [now.status for now in deploying.run({}, soon())]
    assert seen == ["DEPLOYING", "RUNNING"]


def test_a_failed_deployment_is_an_error_with_its_own_reason(driver) -> None:
    message = "Traceback\n  ValueError: no room for one request"
    driver(progress("DEPLOY_FAILED", status="DEPLOY_FAILED", message=message))
    with pytest.raises(DeployError, match=r"^decode: ValueError: no room"):
        run_all()


def test_an_error_of_the_driver_carries_its_traceback_for_debugging(driver) -> None:
    driver("say(error='no cluster', traceback='File x.py')")
    with pytest.raises(DeployError) as caught:
        run_all()
    assert str(caught.value) == "no cluster"
    assert caught.value.__notes__ == ["File x.py"]


def test_a_driver_that_crashes_while_deploying_is_an_error_with_its_last_words(
    driver, tmp_path: Path
) -> None:
    driver("sys.stdin.readline(); " + NOISE + SEGFAULT)
    with pytest.raises(DeployError, match="was ended by signal 11: Fatal: the client broke"):
        run_all(tmp_path / "driver.log")
    assert "Fatal" in (tmp_path / "driver.log").read_text()


def test_a_deadline_that_passes_names_what_is_missing(driver) -> None:
    driver(progress("DEPLOYING") + "sys.stdin.read()")
    with (
        pytest.raises(DeployError, match="still waiting for decode"),
        AppDeployment({}, None) as it,
    ):
        list(it.run({}, time.monotonic() + 1.5))


def test_what_libraries_print_is_no_event(driver) -> None:
    driver("print('hello from a library', flush=True); " + progress("RUNNING"))
    assert [now.status for now in run_all()] == ["RUNNING"]


def test_a_crash_after_the_app_is_deleted_is_no_error(driver) -> None:
    driver(
        "sys.stdin.readline(); sys.stdin.readline(); "
        "say(deleting='headrace'); say(deleted='headrace'); " + SEGFAULT
    )
    Deletion(INSTANCE, {}).go()


def test_a_crash_before_the_app_is_deleted_is_an_error(driver) -> None:
    driver("sys.stdin.readline(); sys.stdin.readline(); " + NOISE + SEGFAULT)
    with pytest.raises(DeployError, match="signal 11"):
        Deletion(INSTANCE, {}).go()


def test_a_ray_that_takes_no_order_is_given_up_however_long_requests_may_take(
    driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deploy, "ORDER_S", 0.5)
    driver("sys.stdin.read()")
    with pytest.raises(DeployError, match="Ray did not take the order"):
        Deletion(replace(INSTANCE, drain_s=3600.0), {}).go()


def test_a_deletion_that_hangs_is_given_up(driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deploy, "DELETE_S", 0.5)
    monkeypatch.setattr(deploy, "END_S", 0.1)
    driver("say(deleting='headrace'); sys.stdin.read()")
    with pytest.raises(DeployError, match="it was not deleted within 0"):
        Deletion(replace(INSTANCE, drain_s=0.0), {}).go()


@pytest.mark.parametrize(("end", "expected"), [("dismiss", "dismiss"), ("kill", "")])
def test_a_deletion_hears_whether_it_is_dismissed_or_its_owner_was_killed(
    driver, tmp_path: Path, end: str, expected: str
) -> None:
    heard = tmp_path / "heard"
    write = f"sys.stdin.readline(); open({str(heard)!r}, 'w').write(sys.stdin.readline())"
    driver(write)
    child = os.fork()
    if child == 0:
        deletion = Deletion(INSTANCE, {})
        if end == "dismiss":
            deletion.dismiss()
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    deadline = soon()
    while not heard.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.2)
    assert heard.read_text().strip() == expected


def run_all(log: Path | None = None) -> list[Progress]:
    with AppDeployment({}, log) as deploying:
        return list(deploying.run({}, soon()))


@pytest.mark.parametrize("drain", [True, False])
def test_an_instance_is_stopped_when_its_requests_have_had_their_time(
    monkeypatch: pytest.MonkeyPatch, drain: bool
) -> None:
    deleted: list[float] = []

    class Recorded(Deletion):
        def __init__(self, instance: Instance, environment: Mapping[str, str]) -> None:
            self.drain_s = instance.drain_s

        def go(self) -> None:
            deleted.append(self.drain_s)

    monkeypatch.setattr(down, "Deletion", Recorded)
    monkeypatch.setattr(down.cluster, "auth_environment", lambda folder: {})
    own = ProcessId.of(psutil.Process())
    instance = Instance("drained", "t", "ready", address="a:1", supervisor=own, drain_s=77.0)
    said: list[str] = []
    down.stop(instance, said.append, drain=drain)
    assert deleted == ([77.0] if drain else [])
    assert (said != []) is drain and all("within 77 s" in line for line in said)


def test_the_driver_is_told_how_long_an_apps_requests_may_take(driver, tmp_path: Path) -> None:
    file = tmp_path / "order"
    driver(
        f"open({str(file)!r}, 'w').write(sys.stdin.readline()); "
        "say(deleting='headrace'); say(deleted='headrace')"
    )
    Deletion(replace(INSTANCE, drain_s=50.0), {}).go()
    assert json.loads(file.read_text())["wait_s"] == 50.0 + deploy.DELETE_S
