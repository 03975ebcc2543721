"""Logs, metrics and traces: one request id, one prefix each, across all replicas."""

from headrace.observability.setup import ProcessSetup

__all__ = ["ProcessSetup"]
