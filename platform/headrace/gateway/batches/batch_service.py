"""The batches of one gateway with all their parts: routes, runner, gate and relay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from headrace.config.gateway import GatewaySettings
from headrace.gateway.admission.capacity import busiest_step_s
from headrace.gateway.batches.batch_execution import BatchLimits
from headrace.gateway.batches.batch_runner import BatchRunner
from headrace.gateway.batches.line_gate import LineGate
from headrace.gateway.batches.line_pacer import LineLoad
from headrace.gateway.batches.line_relay import LineRelay
from headrace.gateway.batches.routes import BatchRoutes
from headrace.gateway.batches.tenant_batches import BatchState
from headrace.gateway.body_reader import BodyReader
from headrace.gateway.ingress.api_keys import Caller
from headrace.gateway.models.model_table import ModelTable
from headrace.gateway.relay.call import Call
from headrace.gateway.relayed_routes import RelayedRoutes


class BatchService:
    """The batches of one gateway, for one event loop.

    Args:
        state: keeps files and batches.
        settings: the gateway's settings.
        relayed: the handler of requests for the replicas' routes.
        models: the models.
        body_reader: reads bodies.
        caller: returns the caller of a key's hash; None if the key is not accepted.
        on_end: called with the call of each line that has ended.

    Attributes:
        routes: the handlers of `/v1/files` and `/v1/batches`.
    """

    def __init__(
        self,
        state: BatchState,
        settings: GatewaySettings,
        *,
        relayed: RelayedRoutes,
        models: ModelTable,
        body_reader: BodyReader,
        caller: Callable[[str], Caller | None],
        on_end: Callable[[Call], None],
    ) -> None:
        own = settings.batches
        self._state, self._models = state, models
        gate = LineGate(self._load, own.lines_per_replica)
        for model in models:
            model.on_request = gate.on_request
        self._runner = BatchRunner(
            state,
            LineRelay(relayed, models, on_end, settings.request_timeout_s),
            gate,
            caller,
            BatchLimits(own.max_lines, settings.max_body_bytes, own.max_tenant_bytes),
        )
        self.routes = BatchRoutes(state, self._runner, body_reader, own)

    def start(self) -> None:
        """Start to look for batches, and to remove what expired."""
        self._state.start()
        self._runner.start()

    async def aclose(self) -> None:
        """Stop to run batches; other gateways continue at once."""
        await self._runner.aclose()
        await self._state.aclose()

    def batches(self) -> list[dict[str, Any]]:
        """Return the progress of unfinished batches, for the status."""
        return self._runner.batches()

    def _load(self, model_id: str, lines: int) -> LineLoad:
        """Return the load of a model, for a number of lines in flight."""
        model = self._models.get(model_id)
        assert model is not None
        cluster = None if model.placer is None else model.placer.cluster
        view = None if cluster is None or not cluster.has_step_times else cluster.view
        step_s, longer_s = (0.0, 0.0) if view is None else busiest_step_s(view)
        return LineLoad(
            replicas=model.pool.ready_now,
            requests=max(0, model.relaying - model.lines),
            elsewhere=max(0, model.pool.requests_elsewhere - self._runner.lines_elsewhere),
            lines=lines,
            step_s=step_s,
            slowdown=longer_s / step_s if step_s else 1.0,
        )
