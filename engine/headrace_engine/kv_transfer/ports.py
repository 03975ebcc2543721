"""Reserves blocks of TCP ports, so that engines of two apps on one machine never take the same.

Ray gives every app's NIXL side channels the same ports (20000 and 22000 upwards); the second app's
engine then waits for ever for a listener that could not bind. An engine listens tens of seconds
after it has chosen, so its ports are reserved until then: a socket is bound to each and does not
listen. Other reservations of such a port fail; one listener that sets SO_REUSEADDR may bind it, as
ZeroMQ's do.
The kernel ends a reservation with the process that made it.
"""

from __future__ import annotations

import contextlib
import random
import socket

from headrace_kvstore.protocol.address import family

FIRST, LAST = 20_000, 31_999
"""Range below Linux's ephemeral one: no outgoing connection takes a port between check and use."""
TRIES = 200


class ReservedPorts:
    """Consecutive ports that this process holds until `release`.

    Args:
        first: of the ports. sockets: bound to them.
    """

    def __init__(self, first: int, sockets: list[socket.socket]) -> None:
        self.first, self._sockets = first, sockets

    def release(self) -> None:
        """Let others bind the ports."""
        for each in self._sockets:
            each.close()
        self._sockets = []

    def __enter__(self) -> ReservedPorts:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def reserve_ports(count: int, host: str, rng: random.Random | None = None) -> ReservedPorts:
    """Reserve `count` consecutive ports at `host`, an address of this machine.

    A listener takes a reserved port if it sets SO_REUSEADDR before it binds.

    Raises:
        OSError: no such block was found, or `host` is no address of this machine.
    """
    rng = rng or random.Random()
    for _ in range(TRIES):
        base = rng.randrange(FIRST, LAST - count + 1)
        with contextlib.ExitStack() as held:
            sockets: list[socket.socket] = []
            for port in range(base, base + count):
                if (sock := _bound(host, port)) is None:
                    break
                sockets.append(held.enter_context(sock))
            else:
                held.pop_all()
                for sock in sockets:
                    # From here on one listener may bind it, too; other reservations may not.
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                return ReservedPorts(base, sockets)
    _bind(host, 0).close()  # raises if the address is not this machine's
    raise OSError(f"no {count} consecutive free ports between {FIRST} and {LAST} on {host}")


def free_port_block(count: int, host: str, rng: random.Random | None = None) -> int:
    """Find the first of `count` consecutive ports that are free at `host` now. For listeners that
    bind at once; `reserve_ports` is for others.

    Raises:
        OSError: as `reserve_ports`.
    """
    with reserve_ports(count, host, rng) as reserved:
        return reserved.first


def _bound(host: str, port: int) -> socket.socket | None:
    try:
        return _bind(host, port)
    except OSError:
        return None


def _bind(host: str, port: int) -> socket.socket:
    sock = socket.socket(family(host))
    try:
        sock.bind((host, port))
    except OSError:
        sock.close()
        raise
    return sock
