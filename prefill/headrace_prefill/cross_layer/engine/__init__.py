"""Models with fewer KV caches inside vLLM: the models, their attention, their registration."""
