"""Corrections to vLLM's application where it differs from the APIs that clients expect."""
