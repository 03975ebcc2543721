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
"""Time for the fork server's imports. Ray gives up a worker that has not registered after 60 s."""
FORWARDED = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGCONT")
NUMA_VARIABLE = "_VLLM_INTERNAL_NUMACTL_PYTHON_EXECUTABLE"
"""Set by vLLM where it binds a process to a NUMA node, which a fork would not inherit."""


def main() -> NoReturn:
    arguments = sys.argv[1:]
    ignored = _ignored()
    server = _server(arguments, ignored)
    if server is not None:
        _stand_for_child(server, ignored)
    os.execv(sys.executable, [sys.executable, *arguments])


def _server(arguments: list[str], ignored: list[int]) -> socket.socket | None:
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
                "umask": _umask(),
                "fds": fds,
                "ignored": ignored,
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


def _umask() -> int:
    umask = os.umask(0o077)
    os.umask(umask)
    return umask


def _ignored() -> list[int]:
    """Return the signals that this process was told to ignore, as by `nohup`."""
    numbers = [int(getattr(signal, name)) for name in FORWARDED]
    return [number for number in numbers if signal.getsignal(number) == signal.SIG_IGN]


def _stand_for_child(server: socket.socket, ignored: list[int]) -> None:
    """Have the child forked, and end as it does. Returns if there is no child."""
    numbers = [int(getattr(signal, name)) for name in FORWARDED]
    forwarded = [number for number in numbers if number not in ignored]
    early: list[int] = []
    for number in forwarded:
        signal.signal(number, lambda number, frame: early.append(number))
    server.sendall(b"g")
    child = int(_line(server) or 0)
    if child == 0:
        for number in forwarded:
            signal.signal(number, signal.SIG_DFL)
        return
    pidfd = os.pidfd_open(child)
    for number in forwarded:
        signal.signal(number, lambda number, frame: signal.pidfd_send_signal(pidfd, number))
    for number in early:
        signal.pidfd_send_signal(pidfd, number)
    for fd in _inherited_fds():
        os.close(fd)
    status = int(_line(server) or -signal.SIGKILL)
    if status < 0:
        if -status not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
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
