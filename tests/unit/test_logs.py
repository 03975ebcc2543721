"""Headrace's logs read alike in a replica's process and in those of its engine."""

from __future__ import annotations

import inspect
import json
import logging
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace_engine.reporting import logs
from tests.support.contracts import find


@pytest.fixture(autouse=True)
def as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Leave logging as it was."""
    monkeypatch.setenv(logs.ENVIRONMENT, "")
    root = logging.getLogger("headrace")
    kept = list(root.handlers), root.level, root.propagate
    factory = logging.getLogRecordFactory()
    yield
    logging.setLogRecordFactory(factory)
    root.handlers, root.propagate = kept[0], kept[2]
    root.setLevel(kept[1])


def as_vllms_process(*args: Any, **more: Any) -> logging.LogRecord:
    """A record as a process that has imported vLLM makes it."""
    record = logging.LogRecord(*args, **more)
    record.vllm_process_name = "EngineCore"
    return record


def test_an_engine_logs_as_its_replica_was_told_to(capfd: pytest.CaptureFixture[str]) -> None:
    logging.setLogRecordFactory(as_vllms_process)
    logs.set_up("decode", "INFO", True)
    logging.getLogger("headrace").handlers = []  # a new process has the environment alone
    logs.take_up()
    extra = {"request_id": "r", "_nanoseconds": 1}  # Ray adds such a one to each record
    logging.getLogger("headrace.sparse").info("%d MiB", 3, extra=extra)
    logging.getLogger("headrace.sparse").debug("not asked for")
    [line] = capfd.readouterr().err.splitlines()
    said = json.loads(line)
    assert said.pop("time").endswith("Z")
    assert said == {
        "level": "INFO",
        "logger": "headrace.sparse",
        "role": "decode",
        "message": "3 MiB",
        "request_id": "r",
    }


SERVE_WRITES_ON = """
import logging, logging.config, sys
from ray.serve._private.logging_utils import configure_component_logger
from ray.serve.schema import LoggingConfig
from headrace_engine.reporting import logs

configure_component_logger(
    component_name="decode",
    component_id="x",
    logging_config=LoggingConfig(logs_dir=sys.argv[1]),
    max_bytes=1 << 20,
    backup_count=1,
)
logs.set_up("decode", "INFO", True)
logging.config.dictConfig({"version": 1, "disable_existing_loggers": False})  # as vLLM does
logging.getLogger("ray.serve").info("after the engine has started")
"""


def test_serves_log_goes_on_when_vllm_has_configured_its_own(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", SERVE_WRITES_ON, str(tmp_path)], check=True, timeout=60)

    [log] = tmp_path.glob("*.log")
    assert "after the engine has started" in log.read_text()


def test_plain_text_can_be_asked_for(capfd: pytest.CaptureFixture[str]) -> None:
    logs.set_up("prefill", "WARNING", False)
    logs.take_up()
    logging.getLogger("headrace.kvstore").info("not asked for")
    logging.getLogger("headrace.kvstore").warning("a disk is full")
    assert capfd.readouterr().err.endswith("WARNING prefill headrace.kvstore: a disk is full\n")


def test_an_exception_is_part_of_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    logs.set_up("decode", "INFO", True)
    try:
        raise ValueError("no such block")
    except ValueError:
        logging.getLogger("headrace.engine").exception("a step failed")
    [line] = capsys.readouterr().err.splitlines()
    assert "ValueError: no such block" in json.loads(line)["exception"]


def test_an_engine_of_no_replica_keeps_its_own_logging() -> None:
    root = logging.getLogger("headrace")
    before = list(root.handlers)
    logs.take_up()
    assert root.handlers == before


def test_vllm_calls_it_in_each_of_an_engines_processes() -> None:
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    points = tomllib.loads(text)["project"]["entry-points"]["vllm.general_plugins"]
    assert find(points["headrace_logs"], "pyproject.toml") is logs.take_up
    for process in (
        "vllm.v1.engine.core:EngineCore",
        "vllm.v1.worker.worker_base:WorkerWrapperBase",
    ):
        assert "load_general_plugins()" in inspect.getsource(find(process, "pyproject.toml"))
