"""A request in its handler: what came with it, and whether it may administer."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from headrace.gateway.asgi import Interrupts, Receive, Send
from headrace.gateway.keys import ANYONE, Caller
from headrace.gateway.relay import Call

FORWARDING = frozenset({b"forwarded", b"via", b"x-forwarded-for", b"x-real-ip"})
"""Headers by which a proxy says that it forwards for somebody else."""


@dataclass(slots=True)
class Asked:
    """A request in its handler.

    Attributes:
        path: without the app's root, and without its query.
        seen: the client's headers.
        client: its address and port, as ASGI has them; None if nobody knows.
        caller: who the request's key proves it comes from.
        interrupts: what ends the handler early.
    """

    call: Call
    path: str
    receive: Receive
    send: Send
    seen: dict[bytes, bytes]
    client: Sequence[Any] | None
    caller: Caller = ANYONE
    interrupts: Interrupts = field(default_factory=Interrupts)

    @property
    def may_administer(self) -> bool:
        """Whether the request may change how the app works, or look into it.

        With keys that takes one whose role is admin. Without keys it takes a client on this
        machine, and no proxy in between: a proxy is on this machine whoever its client is.
        """
        if self.caller is not ANYONE:
            return self.caller.role == "admin"
        if self.client is None or not FORWARDING.isdisjoint(self.seen):
            return False
        try:
            return ipaddress.ip_address(self.client[0]).is_loopback
        except ValueError:
            return False
