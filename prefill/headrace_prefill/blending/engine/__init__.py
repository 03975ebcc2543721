"""KV blending inside a vLLM engine: place stored KV, probe, recompute chosen rows."""
