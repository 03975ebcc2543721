"""What the supervisor removes when it ends a node."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.observability.shared_memory import shm_names
from tests.support.app import until

ENGINE = """
import multiprocessing, os, pathlib, signal, sys, time
from multiprocessing import resource_tracker

signal.signal(signal.SIGTERM, signal.SIG_IGN)
lock = multiprocessing.get_context("spawn").Lock()
pathlib.Path(sys.argv[1]).write_text(lock._semlock.name)
time.sleep(3)
os.kill(resource_tracker._resource_tracker._pid, signal.SIGKILL)
os.kill(os.getpid(), signal.SIGKILL)
"""
"""Starts, makes a semaphore and is killed."""
RAY = """
import signal, subprocess, sys, time

def stop(*_):
    subprocess.run([sys.executable, "-c", sys.argv[1], sys.argv[3]])
    sys.exit()

signal.signal(signal.SIGTERM, stop)
open(sys.argv[2], "w").close()
while True:
    time.sleep(1)
"""
"""Starts an engine while it is told to stop."""


@pytest.mark.timeout(60)
def test_semaphores_of_an_engine_that_dies_while_the_node_ends_are_removed(tmp_path: Path) -> None:
    ready, made = tmp_path / "ready", tmp_path / "made"
    spec = {
        "name": "x",
        "temp_dir": str(tmp_path),
        "command": [sys.executable, "-c", RAY, ENGINE, str(ready), str(made)],
        "listener": None,
        "token": secrets.token_hex(8),
        "shm_before": sorted(shm_names()),
    }
    (tmp_path / "spec.json").write_text(json.dumps(spec))
    supervisor = subprocess.Popen(
        [sys.executable, "-m", "headrace.cli.supervisor", str(tmp_path / "spec.json")],
        start_new_session=True,
    )
    try:
        until(ready.exists, 30.0, "the node runs")
        supervisor.terminate()
        supervisor.wait(30)
    finally:
        if supervisor.poll() is None:
            os.killpg(supervisor.pid, signal.SIGKILL)
    name = f"sem.{made.read_text().lstrip('/')}"
    assert name.startswith("sem.mp-")
    assert name not in shm_names()
