"""The error of an engine that did not start is its cause, in whichever process that was."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from headrace_engine.reporting import start_errors
from headrace_engine.reporting.start_errors import EngineStartError, causes_told
from tests.support.contracts import find

PROCESS = """
import logging
from headrace_engine.reporting.start_errors import take_up
take_up(); take_up()
try: {body}
except Exception: logging.getLogger("vllm.v1.engine.core").exception("EngineCore failed to start.")
"""


def process(body: str) -> None:
    """A process of an engine."""
    subprocess.run([sys.executable, "-c", PROCESS.format(body=body)], check=True, timeout=60)


def test_the_first_cause_is_told_in_place_of_vllms_hint() -> None:
    cause = "not start: ValueError: block_size is 7"
    with pytest.raises(EngineStartError, match=cause) as told, causes_told():
        process("raise ValueError('block_size is 7')")
        process("raise RuntimeError('a worker has ended')")
        raise RuntimeError("Engine core initialization failed. See root cause above.")
    assert isinstance(told.value.__cause__, RuntimeError)
    assert start_errors.ENVIRONMENT not in os.environ


def test_an_error_without_a_cause_elsewhere_stays_as_it_is() -> None:
    with pytest.raises(RuntimeError, match="no memory"), causes_told():
        process("pass")
        raise RuntimeError("no memory")


def test_a_cause_is_no_longer_than_a_page_and_later_errors_are_not_written(tmp_path: Path) -> None:
    log = logging.getLogger("test.start.errors")
    handler = start_errors.FirstError(tmp_path / "error")
    log.addHandler(handler)
    for text in ("x" * 10_000, "later"):
        try:
            raise ValueError(text)
        except ValueError:
            log.exception("failed")
    assert (tmp_path / "error").read_text() == f"ValueError: {'x' * 10_000}"[: start_errors.LONGEST]


def test_vllm_calls_it_in_each_of_an_engines_processes() -> None:
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    points = tomllib.loads(text)["project"]["entry-points"]["vllm.general_plugins"]
    assert find(points["headrace_start_errors"], "pyproject.toml") is start_errors.take_up
