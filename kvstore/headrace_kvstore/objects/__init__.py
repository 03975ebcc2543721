"""The object tier: KV blocks in an object store."""
