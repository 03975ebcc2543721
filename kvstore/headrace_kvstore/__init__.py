"""Keeping, moving and measuring KV. Imports nothing else of ours."""

__version__ = "0.1.0"
