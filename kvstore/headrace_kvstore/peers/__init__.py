"""Blocks of other nodes: leased from their owner, read one-sided over NIXL into this arena."""
