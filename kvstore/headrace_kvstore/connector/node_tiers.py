"""Asks the local StoreNode which blocks its tiers below DRAM hold, for the scheduler half."""

from __future__ import annotations

from collections.abc import Sequence

from headrace_kvstore.connector.store_settings import StoreSettings
from headrace_kvstore.nvme.segment import Location
from headrace_kvstore.protocol.client import NodeClient

FORGOTTEN_AT = 1024
"""Answers that nobody came for, since their requests have ended."""


class NodeTiers:
    """`SlowTiers` over the line to a StoreNode; without one, every answer is: nothing.

    Args:
        settings: of the store; its name leads to the node.
        digest: of the engine's namespace.
    """

    def __init__(self, settings: StoreSettings, digest: bytes) -> None:
        self._client = NodeClient(settings.name, timeout_s=settings.node_timeout_s)
        self._digest, self._lease_s = digest, settings.lease_s
        self._held: dict[str, tuple[Sequence[bytes], float]] = {}
        self._answers: dict[str, list[Location]] = {}

    def ask(self, request_id: str, hashes: Sequence[bytes], compute_s: float) -> None:
        """Ask the node; returns at once.

        While it is being found out whether a node is there, the question is held: the client
        would answer that there is nothing, and a prompt is long to compute.
        """
        self._held[request_id] = hashes, compute_s
        self._let_go()

    def answer(self, request_id: str) -> list[Location] | None:
        """What the node has said, if it has; the client answers for a node that does not."""
        self._let_go()
        for answer in self._client.poll():
            self._answers[answer.request_key] = answer.locations
        while len(self._answers) > FORGOTTEN_AT:
            self._answers.pop(next(iter(self._answers)))
        return self._answers.pop(request_id, None)

    def _let_go(self) -> None:
        if self._held and (self._client.up or self._client.stats()["state"] != "trying"):
            held, self._held = self._held, {}
            for request_id, (hashes, compute_s) in held.items():
                self._client.ask_locate(request_id, self._digest, hashes, self._lease_s, compute_s)

    def report_bad(self, hashes: Sequence[bytes]) -> None:
        """Have the node drop blocks whose bytes were not right."""
        self._client.report_bad(self._digest, hashes)

    def close(self) -> None:
        self._client.close()
