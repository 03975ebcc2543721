"""Index of the blocks that each engine and node holds, learned from their KV events."""
