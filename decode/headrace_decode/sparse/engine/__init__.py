"""Sparse attention at decode inside a vLLM engine on a CPU (docs/sparse.md)."""
