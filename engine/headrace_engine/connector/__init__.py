"""The store as a KV connector for unpatched vLLM.

--kv-transfer-config '{"kv_connector": "HeadraceConnector", "kv_role": "kv_both",
    "kv_connector_module_path": "headrace_engine.store_connector",
    "kv_load_failure_policy": "recompute"}'
"""
