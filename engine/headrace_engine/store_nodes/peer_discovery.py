"""Connections between the StoreNodes of an app's machines, so that each pulls from the others.

Each turn asks all nodes for their addresses again, because machines come and go and a restarted
node listens at another port. A node that does not answer keeps its last address: otherwise one
slow answer would make its peers replay its events. A single node opens no port.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

Ask = Callable[..., Awaitable[Any]]
"""(node, method, *arguments) -> the node's answer; None if it gives none. Never raises."""


class PeerDiscovery:
    """The nodes' addresses, HOST:PORT, as far as the nodes have reported them."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask
        self._addresses: dict[str, str] = {}

    async def update(self, nodes: Mapping[str, Any]) -> None:
        """Have each of these nodes, by machine, follow all the others."""
        addresses: dict[str, Any] = {}
        if len(nodes) > 1:
            answers = await asyncio.gather(
                *(self._ask(node, "serve_peers") for node in nodes.values())
            )
            addresses = dict(zip(nodes, answers, strict=True))
        known = {
            machine: addresses.get(machine) or self._addresses.get(machine) for machine in nodes
        }
        self._addresses = {machine: address for machine, address in known.items() if address}
        await asyncio.gather(
            *(
                self._ask(nodes[machine], "set_peers", self._others(machine))
                for machine in self._addresses
            )
        )

    def _others(self, machine: str) -> list[str]:
        return [address for other, address in self._addresses.items() if other != machine]
