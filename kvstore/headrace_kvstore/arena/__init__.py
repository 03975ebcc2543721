"""The DRAM tier: KV blocks in one shared-memory file a node, mapped by every engine process."""
