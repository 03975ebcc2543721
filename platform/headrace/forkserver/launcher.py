"""Stand-in for `python` that has the fork server run the command (see the package's docstring).

Run as `python -IS launcher.py ARGUMENTS OF PYTHON`. It imports as little as possible, because each
process starts by it.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

ADDRESS_VARIABLE = "HEADRACE_FORK_SERVER"
"""Abstract Unix address of the fork server."""
WAIT_S = 45.0
"""For the fork server's imports. Ray gives up on a worker that has not registered after 60 s."""
FORWARDED = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGCONT")
NUMA_VARIABLE = "_VLLM_INTERNAL_NUMACTL_PYTHON_EXECUTABLE"
"""Set by vLLM where it binds a process to a NUMA node, which a fork would not inherit."""


def main() -> NoReturn:
    arguments = sys.argv[1:]
    server = _server(arguments)
    if server is None:
        os.execv(sys.executable, [sys.executable, *arguments])
    _stand_for_child(server)


def _server(arguments: list[str]) -> socket.socket | None:
    """Return the connection to a fork server that is ready to fork; None if there is none."""
    address = os.environ.get(ADDRESS_VARIABLE)
    if not address or NUMA_VARIABLE in os.environ:
        return None
    fds = _inherited_fds()
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        server.connect("\0" + address)
        of = server.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        if int.from_bytes(of[4:8], sys.byteorder) == os.getuid():
            request = {
                "arguments": arguments,
                "environment": dict(os.environ),
                "folder": os.getcwd(),
                "fds": fds,
                "niceness": os.getpriority(os.PRIO_PROCESS, 0),
                "cores": sorted(os.sched_getaffinity(0)),
            }
            text = json.dumps(request).encode()
            socket.send_fds(server, [len(text).to_bytes(4, "big")], fds)
            server.sendall(text)
            server.settimeout(WAIT_S)
            if server.recv(1) == b"y":
                server.settimeout(None)
                return server
    except OSError:
        pass
    server.close()
    return None


def _inherited_fds() -> list[int]:
    """Return the file descriptors that this process was given."""
    fds = []
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.get_inheritable(int(name)):
                fds.append(int(name))
        except OSError:  # the one that listed them
            pass
    return fds


def _stand_for_child(server: socket.socket) -> NoReturn:
    """Have the child forked, and end as it does. Never returns."""
    early = []
    for name in FORWARDED:
        signal.signal(getattr(signal, name), lambda number, frame: early.append(number))
    server.sendall(b"g")
    child = int(_line(server))
    pidfd = os.pidfd_open(child)
    for name in FORWARDED:
        signal.signal(
            getattr(signal, name), lambda number, frame: signal.pidfd_send_signal(pidfd, number)
        )
    for number in early:
        signal.pidfd_send_signal(pidfd, number)
    for fd in _inherited_fds():
        os.close(fd)
    status = int(_line(server) or -signal.SIGKILL)
    if status < 0:
        number = -status
        if number not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(status)


def _line(server: socket.socket) -> str:
    """Return the next line without its end; empty where the connection has ended."""
    line = b""
    while True:
        part = server.recv(1)
        if part in (b"", b"\n"):
            return line.decode() if part else ""
        line += part


if __name__ == "__main__":
    main()
