"""A gateway's backend without any replica, for benchmarks to extend."""

from __future__ import annotations

from typing import Any

from headrace.gateway.backend import OneModelBackend


class EmptyCluster(OneModelBackend):
    """Answers everything with nothing, and lists no replicas."""

    async def status(self) -> dict[str, Any]:
        return {}

    async def openapi(self) -> dict[str, Any]:
        return {}

    async def plan(self, request_id: str) -> dict[str, Any] | None:
        return None

    async def warm(self, body: dict[str, Any], salt: str, pin: bool) -> list[dict[str, Any]]:
        return []

    async def set_speculation(self, command: dict[str, Any]) -> list[dict[str, Any]]:
        return []

    async def send_corpus_command(self, command: dict[str, Any]) -> list[dict[str, Any]]:
        return []

    async def set_policy(self, policy: str) -> int:
        return 0

    async def admitted(self) -> dict[str, dict[str, float]]:
        return {}

    async def metrics(self) -> bytes:
        return b""
