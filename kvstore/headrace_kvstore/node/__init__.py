"""The StoreNode: one process a machine that looks after its KV tiers."""
