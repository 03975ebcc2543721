"""Sparse attention at decode inside a vLLM engine on a CUDA GPU (docs/sparse.md)."""
