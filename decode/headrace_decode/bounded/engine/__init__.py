"""Drops KV of long contexts in a vLLM engine."""
