"""The error of an engine that did not start is its cause, in whichever process that was."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import cast

import pytest
from pydantic import BaseModel
from vllm.v1.engine.exceptions import EngineDeadError

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


@pytest.mark.parametrize(
    ("status", "cause"),
    [
        (-9, "ended by SIGKILL; the kernel does that when memory is used up: lower kv_cache_gb"),
        (-11, "ended by SIGSEGV"),
        (-77, "ended by signal 77"),
        (1, "ended and logged no error"),
    ],
)
def test_a_process_that_wrote_no_cause_is_told_by_its_end(status: int, cause: str) -> None:
    hint = f"initialization failed. See root cause above. Failed core proc(s): {{'E': {status}}}"
    with pytest.raises(EngineStartError, match=cause) as told, causes_told():
        raise RuntimeError(hint)
    assert "root cause" not in str(told.value)


def test_a_dead_engine_that_wrote_no_cause_does_not_point_above() -> None:
    error = EngineDeadError()
    assert "root cause" in str(error)
    assert "root cause" not in start_errors.start_cause(error, None)


@pytest.mark.parametrize(
    ("cause", "remedy"),
    [
        ("HarmonyError: error downloading or loading vocab file", "TIKTOKEN_ENCODINGS_BASE"),
        ("ValueError: Model architectures ['X'] are not supported for now", "another model"),
        ("RuntimeError: Cannot allocate memory", "lower kv_cache_gb"),
        ("ValueError: No available memory for the cache blocks.", "raise kv_cache_gb"),
        ("OSError: [Errno 28] No space left on device: '/dev/shm/x'", "store.dram_gb"),
    ],
)
def test_a_known_cause_has_its_remedy(cause: str, remedy: str) -> None:
    assert remedy in start_errors.start_cause(RuntimeError("above"), cause)


def test_invalid_values_are_told_in_one_line_without_a_link_to_a_manual() -> None:
    """Ray puts pydantic's text into an error of its own."""

    class Settings(BaseModel):
        dtype: int

    with pytest.raises(EngineStartError) as told, causes_told():
        try:
            Settings(dtype="wide")  # type: ignore[arg-type]
        except ValueError as error:
            raise RuntimeError(f"Failed to create vLLM engine config: {error}") from None
    text = str(told.value)
    assert text.startswith(
        "the engine did not start: RuntimeError: Failed to create vLLM engine config: dtype Input "
    )
    assert "\n" not in text and "https" not in text and "input_value" not in text


def test_the_list_of_all_models_of_vllm_is_left_out() -> None:
    text = "1 validation error for ModelConfig\n  Value error, Model architectures ['Foo'] are not "
    text += "supported for now. Supported architectures: dict_keys(['Llama']) [type=value_error, "
    told = start_errors.start_cause(ValueError(text + "input_value={}, input_type=dict]"), None)
    assert told.startswith("ValueError: Model architectures ['Foo'] are not supported for now; ")
    assert "Llama" not in told


def test_a_fault_is_told_with_its_place() -> None:
    try:
        [][1]
    except IndexError as error:
        told = start_errors.in_one_line(error)
    assert told.startswith("IndexError: list index out of range (line ")
    assert told.endswith("of unit/test_start_errors.py)")


def test_a_fault_in_vllm_says_that_it_is_vllms() -> None:
    from vllm.v1.core.kv_cache_utils import BlockHash, get_block_hash

    with pytest.raises(TypeError) as raised:
        get_block_hash(cast(BlockHash, None))
    told = start_errors.in_one_line(raised.value)
    assert "of core/kv_cache_utils.py); vLLM fails with this model" in told


def test_a_cause_of_several_lines_becomes_one_line() -> None:
    told = start_errors.in_one_line(ValueError("no kernel\n  for this cache\n"))
    assert told == "ValueError: no kernel for this cache"


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
