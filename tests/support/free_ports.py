"""Whether TCP ports are free."""

from __future__ import annotations

import socket

from headrace_kvstore.protocol.address import family


def is_free(port: int, host: str) -> bool:
    """Whether a port has neither a listener nor a reservation."""
    with socket.socket(family(host)) as probe:
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True
