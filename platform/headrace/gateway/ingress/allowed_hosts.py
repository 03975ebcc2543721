"""The names by which browsers may reach the endpoint: protection against DNS rebinding.

A site can make its own name point to this machine or its network (DNS rebinding). To the browser
the endpoint is then a part of that site, and the site's pages may do everything that a client
without a key may do. The `Host` of such a request reveals it: it is the name of the site. With API
keys the page has no key, and over TLS the certificate does not have that name. The `Host` is
therefore checked only if there is neither.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable

from headrace.gateway import errors

LOCAL_SUFFIXES = (".localhost", ".local", ".internal", ".lan", ".home.arpa", ".svc")
"""Names below these have no owner on the Internet: RFC 6761, RFC 6762, RFC 8375, ICANN's
reservation of `.internal` (2024), and the names of Kubernetes' services."""


class AllowedHosts:
    """The names by which requests may reach an endpoint: IP addresses, names without a dot, names
    of local networks, and names in the configuration.

    Args:
        names: more names, such as `llm.example.com` or `*.example.com`; `*` is any.
    """

    def __init__(self, names: Iterable[str]) -> None:
        given = {name.lower().rstrip(".") for name in names}
        self._any = "*" in given
        self._suffixes = tuple(name[1:] for name in given if name.startswith("*."))
        self._names = given | {socket.gethostname().lower()}

    def check(self, host: bytes | None) -> None:
        """Refuse a request with a `Host` that is no name of the endpoint. Browsers always send one.

        Raises:
            ApiError: 403, the `Host` is no name of the endpoint.
        """
        if host is None or self._any:
            return
        name = host_name(host)
        if (
            "." in name
            and name not in self._names
            and not name.endswith((*LOCAL_SUFFIXES, *self._suffixes))
            and _address(name) is None
        ):
            raise errors.host_not_allowed(name)


def is_loopback(host: bytes | None) -> bool:
    """Return whether a `Host` names the client's own machine; True without one."""
    if host is None:
        return True
    name = host_name(host)
    address = _address(name)
    if address is not None:
        return address.is_loopback
    return name == "localhost" or name.endswith(".localhost")


def host_name(host: bytes) -> str:
    """Return the name or the address in a `Host` header, in lower case and without its port."""
    text = host.decode("latin-1").strip().lower()
    if text.startswith("["):
        return text[1:].partition("]")[0]
    return text.rpartition(":")[0].rstrip(".") if text.count(":") == 1 else text.rstrip(".")


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None
