"""Sparse attention at decode inside a vLLM engine (docs/sparse.md)."""
