"""A replica's line: what it publishes to all gateways of the app.

    events  PUB     batches of block events, reports and beats (`protocol.events` has the frames)
    replay  ROUTER  batches again, for who missed some

Both sockets let in only who has the replica's token (`protocol.membership`). Serve tells gateways
the token, with the endpoints and the epoch, which is another one after each start. One thread does
all sending; no caller waits.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable
from itertools import count
from typing import Any

from msgspec.structs import replace

from headrace_engine.reporting.report import Report, encode
from headrace_kvstore.protocol.address import host_port
from headrace_kvstore.protocol.events import Change, EventPublisher
from headrace_kvstore.protocol.membership import Membership

KEPT_BYTES = 4 * 2**20
"""Of batches behind the last whole state. An engine's whole state is smaller than most of these."""


class Line:
    """Bound from the start. `report`, `publish` and `resync` may be called from any thread.

    Args:
        token: what gateways prove themselves with, at least 16 characters from a random source.
        host: the IP address to listen at; the ports are any that are free.
        contents: all blocks that the engine holds now; called on the line's thread.
        on_followed: called on the line's thread when a gateway begins to listen and none did.

    Raises:
        zmq.ZMQError: there is no such address here.
    """

    def __init__(
        self,
        token: str,
        host: str,
        contents: Callable[[], Iterable[Change]] = tuple,
        on_followed: Callable[[], None] = lambda: None,
    ) -> None:
        self.epoch = secrets.token_hex(8)
        self._token = token
        self._numbers = count()
        anywhere = f"tcp://{host_port(host, '*')}"
        self._publisher = EventPublisher(
            *(anywhere, anywhere, contents),
            kept_bytes=KEPT_BYTES,
            members=Membership(token),
            beats=True,
            on_followed=on_followed,
            name="headrace-line",
        )

    def info(self) -> dict[str, str | None]:
        """What a gateway needs to follow it, the token included."""
        return {
            "events": self._publisher.endpoint,
            "replay": self._publisher.replay_endpoint,
            "epoch": self.epoch,
            "token": self._token,
        }

    @property
    def followed(self) -> bool:
        """Whether a gateway listens."""
        return self._publisher.followed

    def report(self, report: Report) -> None:
        """Tell how the replica stands. Sent at once, or 20 ms after the report before; of those
        that wait only the newest is sent. Its `seq` is set here.

        Raises:
            ValueError: it has too many bytes.
        """
        self._publisher.report(encode(replace(report, seq=next(self._numbers))))

    def publish(self, changes: list[Change]) -> None:
        """Tell that blocks came or went, in order."""
        self._publisher.publish(changes)

    def resync(self) -> None:
        """Tell everything that is held: not every change was told."""
        self._publisher.resync()

    def stats(self) -> dict[str, Any]:
        """JSON-able counts, without the token."""
        return self._publisher.stats()

    def close(self) -> None:
        """Unbind."""
        self._publisher.close()
