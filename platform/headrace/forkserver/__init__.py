"""Processes that have vLLM imported as soon as they start.

Importing vLLM and Ray Serve LLM takes 15 s of a processor, and an app with one prefill and one
decode replica does it eight times. Here one process of a private Ray node, the fork server, imports
them once. Programs start `launcher` in place of `python`. The launcher has the fork server fork a
child that does the work of that `python`, and then stands for the child: it passes signals on, ends
with the child's exit status, and the child is killed if the launcher is.

`headrace up` starts its driver by the launcher, Ray its workers (`py_executable` of a
`runtime_env`), and multiprocessing the engine cores of vLLM (`multiprocessing.set_executable`).
Where no fork server answers, or the environment differs in a variable that modules read when they
are imported, the launcher becomes `python`.
"""

from __future__ import annotations

import shlex
import socket
import sys
from pathlib import Path

LAUNCHER = (sys.executable, "-IS", str(Path(__file__).with_name("launcher.py")))
"""Command in place of `python`."""
SERVER = (
    *(sys.executable, "-X", "room_for_titles" + 100 * "_"),
    *("-m", "headrace.forkserver.server"),
)
"""Command of the fork server. A child's title, as `ps` shows it, has the room of this line."""

OF_IMPORTS = (
    *("PYTHON", "LD_", "MALLOC_", "GLIBC_", "HOME", "XDG_", "PATH", "LANG", "LC_", "TZ"),
    *("HF_", "HUGGINGFACE_", "TRANSFORMERS_", "TORCH", "NUMBA_", "TRITON_"),
    *("KMP_", "GOMP_", "OMP_", "OPENBLAS_", "MKL_", "UCX_", "RAY_SERVE_"),
    *("VLLM_LOGGING_", "VLLM_CONFIGURE_", "VLLM_TARGET_", "VLLM_PLUGINS"),
)
"""Beginnings of the names of variables that modules read when they are imported."""
READ_LATER = ("OMP_NUM_THREADS", "PYTHONBREAKPOINT", "RAY_ADDRESS")
"""Variables with such a beginning that are read later, or read again in a forked child."""


def is_of_imports(name: str) -> bool:
    """Whether modules read this environment variable when they are imported."""
    return name.startswith(OF_IMPORTS) and name not in READ_LATER


def py_executable() -> str:
    """Return the launcher's command in the form of Ray's `runtime_env`."""
    return shlex.join(LAUNCHER)


def listen(name: str) -> socket.socket:
    """Listen at an abstract Unix address: for a fork server, before it runs.

    Raises:
        OSError: another process does.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind("\0" + name)
    listener.listen(64)
    return listener
