"""Measures bandwidth and differences between two machines: one listens, the other reads from it.

Both ends are `headrace doctor`. The talk is one JSON line each way, then reads:
the listener serves `SERVED_BYTES` of zeros through NIXL, and sends zeros over plain TCP when asked.
It reads no memory of its peer. Over TCP, UCX does not check who reads, so the listener's memory may
hold nothing worth reading: it is a program that begins with an environment without secrets. It
serves one peer at a time, each for a bounded time even if it is slow, and stops after `serve_s`.
The reader runs in a process of its own, because UCX can crash.
"""

from __future__ import annotations

import base64
import json
import os
import socket
import sys
import time
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

from headrace.cli.probes.child import in_process
from headrace_kvstore.protocol.address import host_port, split_host_port

SERVED_BYTES = 64 * 2**20
PIECE_BYTES = 2 * 2**20
MAX_LINE_BYTES = 256 * 2**10
LONGEST_S = 10.0
WAIT_S = 20.0
MESSAGE_S, NIXL_S, MIN_S = 30.0, 60.0, 1e-3
"""Maximum time of a message, and of reading through NIXL, whose first connection is slow."""
PROTOCOL = "headrace-doctor-1"
KEPT = ("PATH", "HOME", "LANG", "LD_LIBRARY_PATH", "PYTHONPATH", "TMPDIR", "NUMBA_CACHE_DIR")


@dataclass(frozen=True)
class Transfer:
    """Measurements against a peer.

    Attributes:
        nixl_gbps: GB/s read through NIXL from host memory to host memory; None with `nixl_error`.
        tcp_gbps: GB/s of one plain TCP stream, for comparison.
        clock_s: seconds that this machine's clock is ahead of the peer's.
        clock_error_s: half of the round trip in which the clocks were compared.
        facts: the peer's own description, see `facts.describe`.
    """

    nixl_gbps: float | None
    nixl_error: str
    tcp_gbps: float
    clock_s: float
    clock_error_s: float
    facts: dict[str, Any]


def measure(address: str, seconds: float) -> tuple[Transfer | None, str]:
    """Return (the measurements, ""), or (None, why there are none). `seconds`: for each kind of
    transfer."""
    host, port = split_host_port(address)
    code = (
        "import dataclasses, json\n"
        "from headrace.cli.probes.transfer import read\n"
        f"done = read({host!r}, {port}, {min(seconds, LONGEST_S)!r})\n"
        "print('FOUND ' + json.dumps(dataclasses.asdict(done)))"
    )
    found, error = in_process(code, timeout_s=60 + 3 * min(seconds, LONGEST_S))
    return (Transfer(**json.loads(found)), "") if found is not None else (None, error)


def read(host: str, port: int, seconds: float) -> Transfer:
    """Measure against a listener. Raises OSError or ValueError with what is wrong."""
    with _connect(host, port) as connection:
        asked, ends_s = time.time(), time.monotonic() + MESSAGE_S
        _send(connection, {"protocol": PROTOCOL}, ends_s)
        hello = _receive(connection, ends_s)
        answered = time.time()
        if hello.get("protocol") != PROTOCOL:
            where = host_port(host, port)
            raise ValueError(f"{where} is no `headrace doctor --listen` of this version")
        clock_s = (asked + answered) / 2 - float(hello["time"])
        nixl_gbps, nixl_error = None, str(hello["nixl_error"])
        if not nixl_error:
            try:
                nixl_gbps = _read_nixl(hello, seconds)
            except (ImportError, OSError, RuntimeError, ValueError) as error:
                nixl_error = f"{type(error).__name__}: {error}"
        _send(connection, {"send_s": seconds}, time.monotonic() + MESSAGE_S)
        tcp_gbps = _read_tcp(connection, seconds)
    return Transfer(
        nixl_gbps, nixl_error, tcp_gbps, clock_s, (answered - asked) / 2, dict(hello["facts"])
    )


def _connect(host: str, port: int) -> socket.socket:
    """Return a connection. The listener gets `WAIT_S` to start."""
    until = time.monotonic() + WAIT_S
    while True:
        try:
            return socket.create_connection((host, port), timeout=10)
        except ConnectionRefusedError:
            if time.monotonic() > until:
                raise
            time.sleep(0.2)


def _read_nixl(hello: dict[str, Any], seconds: float) -> float:
    from headrace_kvstore.peers.nixl_agent import NixlAgent

    memory = np.ones(SERVED_BYTES, np.uint8)
    agent = NixlAgent(memory.ctypes.data, memory.nbytes)
    try:
        name = agent.connect(base64.b64decode(hello["nixl"])).result(timeout=20)
        offsets = np.arange(0, SERVED_BYTES, PIECE_BYTES, dtype=np.uint64)
        lengths = np.full(len(offsets), PIECE_BYTES, np.uint64)
        local = offsets + np.uint64(memory.ctypes.data)
        remote = offsets + np.uint64(hello["address"])

        def once() -> None:
            agent.read(name, local, remote, lengths, limit_s=20.0).result(timeout=25)

        once()  # connects
        if memory.any():
            raise ValueError("the bytes that came are not those that were served")
        return _rate(once, seconds)
    finally:
        agent.close(5.0)


def _rate(once: Callable[[], None], seconds: float) -> float:
    begun, count = time.perf_counter(), 0
    while (passed := time.perf_counter() - begun) < seconds or count == 0:
        once()
        count += 1
    return count * SERVED_BYTES / passed / 1e9 if passed else 0.0


def _read_tcp(connection: socket.socket, seconds: float) -> float:
    buffer = bytearray(PIECE_BYTES)
    begun, count = time.perf_counter(), 0
    while (got := connection.recv_into(buffer)) > 0:
        count += got
        if time.perf_counter() - begun > 2 * seconds + 5:
            break
    passed = time.perf_counter() - begun
    return count / passed / 1e9 if passed else 0.0


def become_listener(port: int, facts: dict[str, Any], serve_s: float) -> NoReturn:
    """Replace this program by one that only listens, with nothing of this one's memory."""
    env = {k: v for k, v in os.environ.items() if k in KEPT or k.startswith(("UCX_", "NIXL_"))}
    words = [str(port), str(serve_s), json.dumps(facts)]
    os.execve(sys.executable, [sys.executable, "-m", __name__, *words], env)


def main(words: list[str]) -> int:
    """Run the listener. `words`: PORT, SECONDS and its facts as JSON."""

    def ready(port: int) -> None:
        text = f"listening on port {port}; on the other machine: headrace doctor --cluster --peer"
        print(f"{text} THIS-POD:{port}", file=sys.stderr, flush=True)

    try:
        served = listen(int(words[0]), json.loads(words[2]), float(words[1]), ready)
    except OSError as error:
        print(f"error: --listen {words[0]}: {error.strerror or error}", file=sys.stderr)
        return 1
    print(f"{served} peers were served", file=sys.stderr)
    return 0


def listen(port: int, facts: dict[str, Any], serve_s: float, ready: Callable[[int], None]) -> int:
    """Serve peers for `serve_s` seconds. Return how many were served.

    Args:
        ready: called with the port (useful where 0 was asked for).

    Raises:
        OSError: the port is taken.
    """
    from headrace_kvstore.peers.nixl_agent import NixlAgent

    memory = np.zeros(SERVED_BYTES, np.uint8)
    agent, error = None, ""
    try:
        agent = NixlAgent(memory.ctypes.data, memory.nbytes, serving=lambda: True)
    except (ImportError, RuntimeError) as problem:
        error = str(problem)
    hello: dict[str, Any] = {"protocol": PROTOCOL, "facts": facts, "nixl_error": error}
    if agent is not None:
        hello |= {
            "nixl": base64.b64encode(agent.metadata).decode(),
            "address": memory.ctypes.data,
        }
    until, served = time.monotonic() + serve_s, 0
    try:
        with closing(_bind(port)) as server:
            ready(server.getsockname()[1])
            while (left := until - time.monotonic()) > 0:
                server.settimeout(left)
                try:
                    connection, _ = server.accept()
                except TimeoutError:
                    break
                with closing(connection), suppress(OSError, ValueError, LookupError, TypeError):
                    _serve(connection, hello, until)
                    served += 1
    finally:
        if agent is not None:
            agent.close(5.0)
    return served


def _bind(port: int) -> socket.socket:
    if socket.has_dualstack_ipv6():
        with suppress(OSError):  # a kernel without IPv6
            return socket.create_server(("::", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))


def _serve(connection: socket.socket, hello: dict[str, Any], until_s: float) -> None:
    """Serve one peer, until a time of the monotonic clock at most."""

    def within(seconds: float) -> float:
        return min(time.monotonic() + seconds, until_s)

    ends_s = within(MESSAGE_S)
    _receive(connection, ends_s)
    _send(connection, hello | {"time": time.time()}, ends_s)
    # The peer reads through NIXL before it sends the next message.
    seconds = min(float(_receive(connection, within(NIXL_S + LONGEST_S))["send_s"]), LONGEST_S)
    zeros, ends_s = bytes(PIECE_BYTES), within(seconds)
    while (left_s := ends_s - time.monotonic()) > 0:
        connection.settimeout(left_s)
        with suppress(TimeoutError):  # the time to send is over
            connection.sendall(zeros)
    connection.shutdown(socket.SHUT_WR)


def _send(connection: socket.socket, message: dict[str, Any], ends_s: float) -> None:
    connection.settimeout(max(MIN_S, ends_s - time.monotonic()))
    connection.sendall(json.dumps(message).encode() + b"\n")


def _receive(connection: socket.socket, ends_s: float) -> dict[str, Any]:
    """Return the next message, if it arrives by a time of the monotonic clock.

    Raises:
        TimeoutError: it has not, however many of its bytes have.
        ValueError: it is no message of this protocol.
    """
    got = bytearray()
    while not got.endswith(b"\n"):
        connection.settimeout(max(MIN_S, ends_s - time.monotonic()))
        more = connection.recv(65536)
        if time.monotonic() > ends_s:
            raise TimeoutError("the other side is too slow")
        if not more or len(got) + len(more) > MAX_LINE_BYTES:
            raise ValueError("the other side speaks no protocol of `headrace doctor`")
        got += more
    message = json.loads(got)
    if not isinstance(message, dict):
        raise ValueError("the other side speaks no protocol of `headrace doctor`")
    return message


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
