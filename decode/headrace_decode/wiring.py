"""Parts that the app gives a decode replica: a planner, a listener and settings.

`headrace.app` fills `DecodeWiring`; this package does not import the layer above.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from headrace_decode.planning.blending_planner import BlendingPlanner
from headrace_decode.planning.prefill_executor import Planner
from headrace_decode.speculative.tenant_policies import ALL_ALIKE, Tenants
from headrace_engine.adapters.settings import AdapterSettings
from headrace_engine.meter import EngineMeter
from headrace_engine.usage.replica_usage import UsageExports
from headrace_kvstore.lookup.availability import AvailableRun


class Listener(Protocol):
    """A running HTTP server."""

    port: int

    async def stop(self, grace_s: float) -> None: ...


class PrefillAwarePlanner(Planner, Protocol):
    """A planner that can be inspected, and is told when prefill replicas fail and recover."""

    policy: str
    machine: str
    on_change: list[Callable[[], None]]

    @property
    def block_tokens(self) -> int: ...
    @property
    def itl_target_s(self) -> float | None: ...
    def prefill_members(self, replicas: Collection[str]) -> None: ...
    def prefill_up(self, replica: str) -> None: ...
    def prefill_down(self, why: str, replica: str) -> None: ...
    def failing_prefill_replicas(self) -> list[str]: ...
    def explain(self, request_id: str) -> dict[str, Any] | None: ...
    async def available_runs(
        self, token_ids: Sequence[int], salt: str
    ) -> Sequence[AvailableRun]: ...
    def report_fields(self) -> dict[str, Any]: ...
    def stored_tokens(self, token_ids: Sequence[int], salt: str) -> int: ...
    def holds(self, blocks: Sequence[bytes]) -> Sequence[bool]: ...
    def pin(self, token_ids: Sequence[int], salt: str) -> int: ...
    def snapshot(self) -> dict[str, Any]: ...
    def demand(self) -> dict[str, float]: ...


@dataclass(frozen=True)
class DecodeWiring:
    """Functions and settings that the app binds into a decode replica.

    Every callable is importable by name.
    """

    make_planner: Callable[[Any, EngineMeter], PrefillAwarePlanner]
    """(vLLM config of the started engine, its meter) -> planner."""
    listen: Callable[..., Awaitable[Listener]]
    """(asgi app, host, port 0) -> running server, to which gateways relay."""
    setup: Callable[[str], None] | None = None
    group: str = ""
    """The model's name in the configuration; empty if it is the app's only one."""
    system_prompts: tuple[str, ...] = ()
    """System prompts whose KV is made and pinned when the replica starts."""
    adapters: AdapterSettings | None = None
    """The app's LoRA adapters; None if it has none."""
    tenants: Tenants = ALL_ALIKE
    """Drafting policies of the tenants."""
    drafting_metrics: Callable[[], Callable[[Mapping[str, Any]], None]] | None = None
    """Factory of a function that receives every report on drafting."""
    export_left_out: Callable[[Mapping[str, str]], None] | None = None
    """Exports the parts that the engine runs without, by name with the reasons, as a metric."""
    usage: UsageExports | None = None
    """Where the replica's usage goes; None for nowhere."""
    make_blending_planner: (
        Callable[[Callable[[Sequence[int], str], list[bytes]], int], BlendingPlanner] | None
    ) = None
    """(hash function for a prompt's blocks, tokens of a block) -> planner of stored KV to blend at
    other positions; None without KV blending."""
