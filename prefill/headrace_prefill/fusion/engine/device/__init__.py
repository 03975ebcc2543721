"""Attention of layers without KV on a GPU, and what it takes of vLLM."""
