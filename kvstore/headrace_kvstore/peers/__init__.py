"""Pulls of blocks from other nodes: leased by their owner, read one-sided over NIXL."""
