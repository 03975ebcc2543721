"""Attention of layers without KV on a GPU, and its uses of vLLM."""
