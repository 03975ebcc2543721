"""Decides which requests keep their KV in host memory, and gives their blocks to others."""
