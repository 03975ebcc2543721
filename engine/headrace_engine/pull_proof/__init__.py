"""Proof that the KV an engine pulled is the KV of its request (docs/integrity.md)."""
