"""Loads of stored KV into an engine's cache, layer by layer: from DRAM, and from files."""
