"""Calls to the gateways of the app."""

from __future__ import annotations

from ray import serve
from ray.serve.handle import DeploymentHandle

from headrace.gateway.serve_backend.replica_calls import broadcast
from headrace.recent import Recent

RECENT_S = 0.5
"""Maximum age of answers: the queue of each model asks for those of all models once a second."""


class Gateways:
    """The app's gateways, asked over Serve's handle of their deployment."""

    def __init__(self) -> None:
        self._handle: DeploymentHandle | None = None
        self.admitted = Recent(self._admitted, RECENT_S)
        """Returns the seconds of engine time that tenants have had: by gateway, also this one, then
        by model, then by tenant."""

    async def _admitted(self) -> dict[str, dict[str, dict[str, float]]]:
        if self._handle is None:
            context = serve.get_replica_context()
            self._handle = serve.get_deployment_handle(context.deployment, context.app_name)
        return dict(await broadcast(self._handle, "headrace_admitted"))
