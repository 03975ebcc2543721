"""A block of free TCP ports, so that engines of two apps on one machine never ask for the same.

Ray gives every app's NIXL side channels the same ports (20000 and 22000 upwards); the second app's
engine then waits for ever for a listener that could not bind.
"""

from __future__ import annotations

import contextlib
import random
import socket

FIRST, LAST = 20_000, 31_999
"""Below Linux's ephemeral range: no outgoing connection takes a port between look and use."""
TRIES = 200


def free_port_block(count: int, host: str, rng: random.Random | None = None) -> int:
    """First of `count` consecutive ports that nobody listens on at `host`.

    Raises:
        OSError: no such block was found.
    """
    rng = rng or random.Random()
    for _ in range(TRIES):
        base = rng.randrange(FIRST, LAST - count + 1)
        if all(is_free(port, host) for port in range(base, base + count)):
            return base
    raise OSError(f"no {count} consecutive free ports between {FIRST} and {LAST} on {host}")


def is_free(port: int, host: str) -> bool:
    """Whether a listener could bind this port."""
    with contextlib.closing(socket.socket()) as probe:
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True
