"""Reuse of KV that stands at another place of another prompt."""
