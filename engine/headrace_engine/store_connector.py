"""The path at which vLLM finds the KV store's connector (`kv_connector_module_path`)."""

from headrace_engine.connector.connector import HeadraceConnector

__all__ = ["HeadraceConnector"]
