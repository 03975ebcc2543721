"""HOST:PORT with IPv4 addresses, IPv6 addresses and names, and the sockets that reach them.

An IPv6 address is in brackets wherever a port follows it. ZeroMQ looks for IPv4 addresses alone
unless a socket's IPV6 option is set, and for IPv6 addresses first if it is. So this module sets the
option by the address.
"""

from __future__ import annotations

import ipaddress
import socket
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # command-line tools that only join hosts and ports need no ZeroMQ
    import zmq


def host_port(host: str, port: int | str) -> str:
    """Join a host and a port. The host may be in brackets already."""
    bare = host.removeprefix("[").removesuffix("]")
    return f"[{bare}]:{port}" if ":" in bare else f"{bare}:{port}"


def base_url(host: str, port: int) -> str:
    """Return the URL of an HTTP server at an IP address."""
    return f"http://{host_port(host, port)}"


def split_host_port(address: str) -> tuple[str, int]:
    """Split HOST:PORT; return the host without brackets.

    Raises:
        ValueError: it is not HOST:PORT, or an IPv6 host is not in brackets.
    """
    host, colon, port = address.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    bare = host[1:-1] if bracketed else host
    numeric = port.isascii() and port.isdigit()
    if not (colon and bare and numeric) or (":" in bare) != bracketed:
        raise ValueError(f'"{address}" is not HOST:PORT (an IPv6 host is in brackets: [::1]:8000)')
    if int(port) > 65535:
        raise ValueError(f'"{address}": ports end at 65535')
    return bare, int(port)


def family(host: str) -> socket.AddressFamily:
    """Return the family in which a host is reached: IPv4 if it has both and this machine has both.

    Args:
        host: an address or a name, without brackets.
    """
    try:
        version = ipaddress.ip_address(host.partition("%")[0]).version
        return socket.AF_INET6 if version == 6 else socket.AF_INET
    except ValueError:
        pass
    for flags in (socket.AI_ADDRCONFIG, 0):  # a machine may have a loopback address alone
        try:
            found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=flags)
        except (OSError, UnicodeError):
            continue
        families = {each[0] for each in found}
        if families:
            return socket.AF_INET if socket.AF_INET in families else socket.AF_INET6
    return socket.AF_INET


def bind(sock: zmq.Socket[Any], endpoint: str) -> str:
    """Bind a ZeroMQ socket; return the endpoint, with the port that it got.

    Args:
        endpoint: such as tcp://[::1]:5557, ipc:///tmp/a or tcp://*:5557, which is all addresses
            of this machine, IPv6 ones included.

    Raises:
        zmq.ZMQError: it cannot be bound.
    """
    import zmq

    if endpoint.startswith("tcp://*:") and socket.has_dualstack_ipv6():
        try:
            sock.setsockopt(zmq.IPV6, 1)
            sock.bind(endpoint)
            return sock.get_string(zmq.LAST_ENDPOINT)
        except zmq.ZMQError:  # IPv6 is switched off, or the port is taken
            pass
    _choose_family(sock, endpoint)
    sock.bind(endpoint)
    return sock.get_string(zmq.LAST_ENDPOINT)


def connect(sock: zmq.Socket[Any], endpoint: str) -> None:
    """Connect a ZeroMQ socket. A name is looked up, which may take a while."""
    _choose_family(sock, endpoint)
    sock.connect(endpoint)


def _choose_family(sock: zmq.Socket[Any], endpoint: str) -> None:
    import zmq

    scheme, _, address = endpoint.partition("://")
    if scheme == "tcp":
        host = address.rpartition(":")[0].removeprefix("[").removesuffix("]")
        is_6 = host != "*" and family(host) == socket.AF_INET6
        sock.setsockopt(zmq.IPV6, int(is_6))
