"""Tells a replica in one line why its engine did not start, and what to set.

An engine starts in processes of its own. Such a process logs what went wrong and ends; the replica
gets vLLM's "Engine core initialization failed. See root cause above.", or an `EngineDeadError` from
the first steps, and above is a log of another process. So each of these processes also writes its
first logged exception to a file of the replica's, by the entry point `headrace_start_errors` of
`vllm.general_plugins`. The first one to write is the cause: a worker logs before the engine that
waits for it. A process that was killed writes nothing; then the cause is its signal.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path

ENVIRONMENT = "HEADRACE_START_ERROR"
"""Name of the variable that holds the file's path."""
LONGEST = 600
"""Maximum number of characters of a cause."""
NO_CAUSE = re.compile("See root cause above|See stack trace .above. for the root cause")
"""vLLM's errors that refer to the log of another process."""
ENDED = re.compile(r"Failed core proc\(s\): \{.*?: (-?\d+)")
"""vLLM's report of the exit status of an engine's process; below 0 it is a signal."""
ADDITIONS = (
    r"\d+ validation errors? for \w+ (Value error, )?",
    r" \[type=\w+, input_value=.*?, input_type=\w+\]",
    r" For further information visit \S+",
    r" Supported architectures: .*",
)
"""Regular expressions of texts around a cause that do not help an operator."""
FAULTS = AssertionError, AttributeError, LookupError, NotImplementedError, TypeError
"""Errors whose text says little without the place where they were raised."""
REMEDIES = (
    (
        "vocab file|tiktoken",
        "the model's vocabulary file is fetched from the network at start; set "
        "TIKTOKEN_ENCODINGS_BASE to a folder that holds it (prefill.env, decode.env)",
    ),
    (
        "architectures .* are not supported",
        "this vLLM has no such model; serve another model, or install a vLLM that has it",
    ),
    ("out of memory|Cannot allocate memory", "lower kv_cache_gb, or give the replica more memory"),
    ("/dev/shm|No space left on device", "give /dev/shm more room, or lower store.dram_gb"),
    (
        "is larger than the available KV cache memory|No available memory for the cache blocks",
        "raise kv_cache_gb, or lower engine.max_model_len",
    ),
)
"""Regular expressions of causes whose text names no setting of Headrace, and what to set."""


class EngineStartError(RuntimeError):
    """An engine did not start; the text says why."""


class FirstError(logging.Handler):
    """Handler that writes the first exception of a log to a file that does not exist yet."""

    def __init__(self, path: Path) -> None:
        super().__init__(logging.ERROR)
        self._path = path

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if error is not None:
            with contextlib.suppress(OSError), self._path.open("x") as file:
                file.write(in_one_line(error))


def in_one_line(error: BaseException) -> str:
    """Return an error's class and text in one line, without pydantic's and vLLM's additions to the
    cause; a fault with its place."""
    text = " ".join(str(error).split())
    for addition in ADDITIONS:
        text = re.sub(addition, "", text)
    told = f"{type(error).__name__}: {text}"[:LONGEST]
    if not isinstance(error, FAULTS) or error.__traceback__ is None:
        return told
    *_, (frame, line) = traceback.walk_tb(error.__traceback__)
    file = Path(frame.f_code.co_filename)
    told += f" (line {line} of {'/'.join(file.parts[-2:])})"
    if "vllm" in file.parts:
        told += (
            "; vLLM fails with this model and these settings: serve another model, or change them"
        )
    return told


def start_cause(error: BaseException, written: str | None) -> str:
    """Return why an engine did not start, in one line, and what to set where that is known.

    Args:
        error: raised in the replica.
        written: the first error of the engine's processes; None if they wrote none.
    """
    cause = written or in_one_line(error)
    if written is None and NO_CAUSE.search(cause):
        cause = _end_of_process(cause)
    for pattern, remedy in REMEDIES:
        if re.search(pattern, cause, re.IGNORECASE):
            return f"{cause.rstrip('.')}; {remedy}"
    return cause


def _end_of_process(told: str) -> str:
    status = int(found[1]) if (found := ENDED.search(told)) else 0
    if status >= 0:
        return "a process of the engine ended and logged no error; its log has its last lines"
    name = signal.Signals(-status).name if -status in set(signal.Signals) else f"signal {-status}"
    cause = f"a process of the engine was ended by {name}"
    if -status == signal.SIGKILL:
        cause += (
            "; the kernel does that when memory is used up: lower kv_cache_gb, or give the replica "
            "more memory"
        )
    return cause


def take_up() -> None:
    """Watch vLLM's log in a process of vLLM's, which calls this in each of them, perhaps twice."""
    path = os.environ.get(ENVIRONMENT)
    log = logging.getLogger("vllm")
    if path and not any(isinstance(each, FirstError) for each in log.handlers):
        log.addHandler(FirstError(Path(path)))


@contextlib.contextmanager
def causes_told() -> Iterator[None]:
    """Start an engine within; the error of a failed start tells its cause in one line.

    Raises:
        EngineStartError: the start failed.
    """
    with tempfile.TemporaryDirectory(prefix="headrace-start-") as folder:
        file = Path(folder) / "error"
        os.environ[ENVIRONMENT] = str(file)
        try:
            yield
        except Exception as error:
            cause = start_cause(error, file.read_text() if file.exists() else None)
            raise EngineStartError(f"the engine did not start: {cause}") from error
        finally:
            del os.environ[ENVIRONMENT]
