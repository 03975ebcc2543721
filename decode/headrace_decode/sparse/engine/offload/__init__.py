"""Sparse attention's offload in a vLLM engine: KV that is not attended to lies in host memory."""
