"""Sets up the logs of Headrace in each process of a replica: its own and those of its engine.

A log is one JSON object a line on stderr, which Ray collects per process. An engine's processes are
vLLM's, and configure vLLM's logs only: without this, only warnings of Headrace's parts would reach
a file from there, and without their role. So the replica puts its settings into the environment,
and vLLM's processes read them by the entry point `headrace_logs` of `vllm.general_plugins`.

vLLM configures its logs by `logging.config.dictConfig` when an engine starts, which closes all
handlers of the process. Serve's stay attached, but a closed one of theirs keeps each record in
memory, writes none to Serve's file, and has Serve take a replica for a failed one when its
controller starts again. So they are kept open.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from logging.handlers import MemoryHandler
from typing import Any, TextIO

SERVE = "ray.serve"
"""Name of Serve's logger."""
ENVIRONMENT = "HEADRACE_LOGS"
"""Name of the variable that holds the arguments of `set_up`, as JSON."""

_STANDARD = frozenset(vars(logging.LogRecord("", 0, "", 0, "", None, None))) | {
    "message",
    "asctime",
    "vllm_process_name",  # vLLM adds it to each record of a process that has imported it
}


class JsonFormatter(logging.Formatter):
    """Formatter of one JSON object a line: time, level, logger, role, message and the fields of
    `extra`."""

    def __init__(self, role: str):
        super().__init__()
        self._role = role

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
            + f".{int(record.msecs):03d}Z",
            "level": record.levelname,
            "logger": record.name,
            "role": self._role,
            "message": record.getMessage(),
        }
        for name, value in vars(record).items():
            if name not in _STANDARD and not name.startswith("_"):  # Ray adds one of its own
                line[name] = value
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def set_up(role: str, level: str, as_json: bool, to: TextIO | None = None) -> None:
    """Set up logs in this process and in the engine that it starts.

    Args:
        role: of the replica. level: minimum severity, as `logging` names it.
        to: stream in place of `sys.stderr`.
    """
    handler = logging.StreamHandler(to or sys.stderr)
    handler.setFormatter(
        JsonFormatter(role)
        if as_json
        else logging.Formatter(f"%(asctime)s %(levelname)s {role} %(name)s: %(message)s")
    )
    root = logging.getLogger("headrace")
    root.handlers = [handler]
    root.setLevel(level)
    root.propagate = False
    os.environ[ENVIRONMENT] = json.dumps({"role": role, "level": level, "as_json": as_json})
    _keep_open(*logging.getLogger(SERVE).handlers)


def _keep_open(*handlers: logging.Handler) -> None:
    """Have `close` of these handlers, and of those that they write to, only flush."""
    for handler in handlers:
        handler.close = handler.flush  # type: ignore[method-assign]
        if isinstance(handler, MemoryHandler) and handler.target is not None:
            _keep_open(handler.target)


def take_up() -> None:
    """Set up logs in a process of vLLM's, which calls this in each of them, perhaps twice. Without
    effect where no replica has set logs up, as in a plain `vllm serve`."""
    if told := os.environ.get(ENVIRONMENT):
        # vLLM writes a prefix before each line of `sys.stderr`.
        set_up(**json.loads(told), to=os.fdopen(os.dup(2), "w", buffering=1))
