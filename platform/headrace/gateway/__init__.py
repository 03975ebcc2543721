"""The gateway: an HTTP relay between OpenAI clients and the decode replicas' own servers.

It chooses the replica that answers a request, decides when a lost request is tried again, and
limits the requests of clients (key, size, time). The client gets the bytes of the replica's answer.
Only in streams the gateway may change them: it removes the lines for resuming from another replica,
and after a resume it replaces ids.
"""

from headrace.gateway.app import GatewayApp, build_gateway_app
from headrace.gateway.backend import Backend, ReplicaInfo
from headrace.gateway.ingress.http_server import PortTakenError, Server, serve_gateway
from headrace.observability.gateway_metrics import GatewayMetrics

__all__ = [
    "Backend",
    "GatewayApp",
    "GatewayMetrics",
    "PortTakenError",
    "ReplicaInfo",
    "Server",
    "build_gateway_app",
    "serve_gateway",
]
