"""The sockets by which a replica publishes to all gateways of the app.

    events  PUB     batches of block events, reports and heartbeats (frames: `protocol.events`)
    replay  ROUTER  batches again, for a gateway that missed some

Both sockets accept only peers that have the replica's token (`protocol.membership`). Serve tells
gateways the token, the endpoints and the epoch, which is a new one after each start. One thread
does all sending; no caller waits.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Sequence
from itertools import count
from typing import Any

from msgspec.structs import replace

from headrace_engine.reporting.report import Report, encode
from headrace_kvstore.protocol.address import host_port
from headrace_kvstore.protocol.events import Change, EventPublisher
from headrace_kvstore.protocol.membership import Membership

KEPT_BYTES = 4 * 2**20
"""Bytes of batches after the last whole state at which a new whole state is published. An engine's
whole state is usually smaller."""


class ReplicaPublisher:
    """Sockets of a replica, bound from the start. `report`, `publish` and `resync` may be called
    from any thread.

    Args:
        token: proof that gateways have to show, at least 16 characters from a random source.
        host: IP address to listen at. The ports are any free ones.
        contents: returns all blocks that the engine holds now; called on the publisher's thread.
        on_first_subscriber: called on the publisher's thread when a gateway begins to listen and
            none did.
        windows: `kv_groups.Window.blocks` of each group of the changes, from group 1 on.

    Raises:
        zmq.ZMQError: this machine has no such address.
    """

    def __init__(
        self,
        token: str,
        host: str,
        contents: Callable[[], Iterable[Change]] = tuple,
        on_first_subscriber: Callable[[], None] = lambda: None,
        windows: Sequence[int] = (),
    ) -> None:
        self.epoch = secrets.token_hex(8)
        self._token, self._windows = token, list(windows)
        self._numbers = count()
        anywhere = f"tcp://{host_port(host, '*')}"
        self._publisher = EventPublisher(
            *(anywhere, anywhere, contents),
            kept_bytes=KEPT_BYTES,
            members=Membership(token),
            heartbeats=True,
            on_first_subscriber=on_first_subscriber,
            name="headrace-events",
        )

    def info(self) -> dict[str, Any]:
        """Return the endpoints, epoch, token and windows that a gateway needs to follow the
        replica."""
        return {
            "events": self._publisher.endpoint,
            "replay": self._publisher.replay_endpoint,
            "epoch": self.epoch,
            "token": self._token,
            "windows": self._windows,
        }

    @property
    def has_subscribers(self) -> bool:
        """Whether a gateway listens."""
        return self._publisher.has_subscribers

    def report(self, report: Report) -> None:
        """Publish a report at once, or 20 ms after the previous one. Of the reports that wait, only
        the newest is sent. This sets its `seq`.

        Raises:
            ValueError: it has too many bytes.
        """
        self._publisher.report(encode(replace(report, seq=next(self._numbers))))

    def publish(self, changes: list[Change]) -> None:
        """Publish changes of the held blocks, in order."""
        self._publisher.publish(changes)

    def resync(self) -> None:
        """Publish all held blocks: a gateway may have missed changes."""
        self._publisher.resync()

    def stats(self) -> dict[str, Any]:
        """Return JSON-able counts, without the token."""
        return self._publisher.stats()

    def close(self) -> None:
        """Unbind the sockets."""
        self._publisher.close()
