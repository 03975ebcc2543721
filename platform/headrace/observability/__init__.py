"""Logs, metrics and traces: one request id and one prefix each across gateway, decode and prefill."""

from headrace.observability.setup import ProcessSetup

__all__ = ["ProcessSetup"]
