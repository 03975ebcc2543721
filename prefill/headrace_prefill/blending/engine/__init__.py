"""Non-prefix reuse inside a vLLM engine: place stored KV, probe, recompute chosen rows."""
