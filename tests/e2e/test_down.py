"""`headrace down` leaves nothing: no process, no file in /dev/shm. Runs behind all that share the
app."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import openai
import psutil
import pytest

from headrace.observability.shared_memory import shm_files, shm_names, shm_users
from tests.support.app import MODEL, Session, run_cli, until

IGNORE_EOS: dict[str, Any] = {"extra_body": {"ignore_eos": True}}

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


def test_down_lets_a_stream_end_and_leaves_no_process_and_no_shared_memory(
    app_session: Session,
) -> None:
    if app_session.app is None:
        pytest.skip("no test of this run started the app")
    url, begun = f"{app_session.app.url}/v1", threading.Event()

    def tokens() -> int:
        with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
            stream = client.completions.create(
                model=MODEL, prompt="One day", max_tokens=64, stream=True, **IGNORE_EOS
            )
            count = 0
            for chunk in stream:
                begun.set()
                count += bool(chunk.choices and chunk.choices[0].finish_reason is None)
            return count

    with ThreadPoolExecutor(1) as threads:
        stream = threads.submit(tokens)
        assert begun.wait(60)
        left = app_session.stop()
        assert stream.result(60) >= 60
    assert not left, "\n".join(left)
    assert not list(app_session.folder.glob("hr-*")), "the node's folder is still there"
    assert not list((app_session.folder / "state").glob("*.json")), "it is still remembered"
    assert app_session.down_s is not None and app_session.down_s < 60
