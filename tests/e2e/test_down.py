"""`headrace down` leaves nothing: no process, no file in /dev/shm. Runs behind all that share the
app."""

from __future__ import annotations

from contextlib import suppress

import psutil
import pytest

from headrace.observability.shared_memory import shm_files, shm_names, shm_users
from tests.support.app import Session, run_cli, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]


def test_the_demo_plays_every_step_and_the_answer_survives_the_kill(app_session: Session) -> None:
    if app_session.app is None:
        pytest.skip("no test of this run started the app")
    log = app_session.folder / "demo.log"
    command = ("demo", "--yes", "--name", app_session.name)
    status = run_cli(app_session.environment, *command, timeout_s=180, log=log)
    played = log.read_text("utf-8")
    assert status == 0, played
    assert "5 of 5" in played and "skipped" not in played
    assert "64 of 64 tokens arrived" in played


def test_the_semaphores_of_a_killed_replica_are_removed_while_the_app_runs(
    app_session: Session,
) -> None:
    if app_session.app is None:
        pytest.skip("no test of this run started the app")
    replica = psutil.Process(app_session.app.replica("decode")["pid"])
    family = [replica, *replica.children(recursive=True)]
    semaphores = shm_files(name for name in shm_names() if name.startswith("sem.mp-"))
    theirs = {file.name for file in shm_users(semaphores, family)}
    assert theirs, "vLLM makes none any more: this test can go"
    for process in family:
        with suppress(psutil.NoSuchProcess):  # an engine ends with its replica
            process.kill()
    until(lambda: not theirs & shm_names(), 20.0, "no semaphore left", lambda: theirs)


def test_down_leaves_no_process_and_no_shared_memory(app_session: Session) -> None:
    if app_session.app is None:
        pytest.skip("no test of this run started the app")
    left = app_session.stop()
    assert not left, "\n".join(left)
    assert not list(app_session.folder.glob("hr-*")), "the node's folder is still there"
    assert not list((app_session.folder / "state").glob("*.json")), "it is still remembered"
    assert app_session.down_s is not None and app_session.down_s < 60
