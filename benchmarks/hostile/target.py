"""The running app: its status, its stalls and what it holds for clients."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import httpx
import psutil

from benchmarks.hostile.attacks import ANSWER_LIMIT_S
from benchmarks.hostile.machine import Parts


class Stall(NamedTuple):
    """How long a loop stood still, and for how long of it its own process used a processor."""

    stall: float = 0.0
    held: float = 0.0


@dataclass
class Target:
    """The running app."""

    url: str
    model: str
    keys: dict[str, str]

    def __post_init__(self) -> None:
        self._admin = httpx.Client(base_url=self.url, headers=self.bearer("admin"), timeout=60)

    def bearer(self, who: str) -> dict[str, str]:
        """Return the header of a key."""
        return {"authorization": f"Bearer {self.keys[who]}"}

    def connect(self) -> socket.socket:
        """Return a connection to the public port."""
        url = urlsplit(self.url)
        return socket.create_connection((url.hostname, url.port), timeout=ANSWER_LIMIT_S)

    def status(self) -> dict[str, Any]:
        """Return the status document."""
        return dict(self._admin.get("/headrace/v1/status").raise_for_status().json())

    def change(self, path: str, body: dict[str, Any]) -> None:
        """Administer."""
        self._admin.put(path, json=body).raise_for_status()

    def decode(self) -> dict[str, Any]:
        """Return the decode replica's part of the status document."""
        return next(r for r in self.status()["replicas"] if r["role"] == "decode")

    def stalls_s(self) -> dict[str, Stall]:
        """Return the longest stalls of the last minute, by loop."""
        found = self.status()
        decode = next(r for r in found["replicas"] if r["role"] == "decode")
        loops = {"gateway": found["gateway"], "decode": decode}
        return {
            name: Stall(*(each[f"loop_{kind}_s"] for kind in Stall._fields))
            for name, each in loops.items()
        }

    def stall_s(self) -> Stall:
        """Return the longest stalls of the last minute, of either loop."""
        return Stall(*map(max, *self.stalls_s().values()))

    def held(self) -> dict[str, float]:
        """Return the requests, body bytes and connections that the gateway holds for clients other
        than this program's administrator."""
        found = self.status()["gateway"]
        port = urlsplit(self.url).port
        ours = {each.laddr.port for each in psutil.Process().net_connections("tcp") if each.raddr}
        open_ones = [
            each
            for each in psutil.Process(found["pid"]).net_connections("tcp")
            if each.raddr and each.laddr.port == port and each.raddr.port not in ours
        ]
        return {
            "held.requests": found["relaying"],
            "held.body_bytes": found["body_bytes"],
            "held.sockets": len(open_ones),
        }

    def parts(self) -> Parts:
        """Its processes."""
        found = self.status()
        replicas = {each["role"]: each["pid"] for each in found["replicas"]}
        return Parts({"gateway": found["gateway"]["pid"], **replicas})
