"""Tells a replica why its engine did not start.

An engine starts in processes of its own. Such a process logs what went wrong and ends; the replica
gets vLLM's "Engine core initialization failed. See root cause above.", or an `EngineDeadError` from
the first steps, and above is a log of another process. So each of these processes also writes its
first logged exception to a file of the replica's, by the entry point `headrace_start_errors` of
`vllm.general_plugins`. The first one to write is the cause: a worker logs before the engine that
waits for it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

ENVIRONMENT = "HEADRACE_START_ERROR"
"""Name of the variable that holds the file's path."""
LONGEST = 2000
"""Maximum number of characters of a cause."""


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
                file.write(f"{type(error).__name__}: {error}"[:LONGEST])


def take_up() -> None:
    """Watch vLLM's log in a process of vLLM's, which calls this in each of them, perhaps twice."""
    path = os.environ.get(ENVIRONMENT)
    log = logging.getLogger("vllm")
    if path and not any(isinstance(each, FirstError) for each in log.handlers):
        log.addHandler(FirstError(Path(path)))


@contextlib.contextmanager
def causes_told() -> Iterator[None]:
    """Start an engine within; the error of a failed start tells its cause.

    Raises:
        EngineStartError: a process of the engine logged an exception, and the start failed.
    """
    with tempfile.TemporaryDirectory(prefix="headrace-start-") as folder:
        file = Path(folder) / "error"
        os.environ[ENVIRONMENT] = str(file)
        try:
            yield
        except Exception as error:
            if not file.exists():
                raise
            raise EngineStartError(f"the engine did not start: {file.read_text()}") from error
        finally:
            del os.environ[ENVIRONMENT]
