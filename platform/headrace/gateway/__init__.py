"""The front door: an HTTP relay between OpenAI clients and the decode replicas' own servers.

It decides which replica answers a request, when a lost request is tried again, and what a client
may ask for (key, size, time). It never looks inside an answer: the bytes of the replica's HTTP
response are the bytes that the client gets.
"""

from headrace.gateway.app import GatewayApp, build_gateway_app
from headrace.gateway.backend import Backend, GatewayMetrics, GatewayOptions, ReplicaInfo
from headrace.gateway.listen import PortTakenError, Server, serve_gateway

__all__ = [
    "Backend",
    "GatewayApp",
    "GatewayMetrics",
    "GatewayOptions",
    "PortTakenError",
    "ReplicaInfo",
    "Server",
    "build_gateway_app",
    "serve_gateway",
]
