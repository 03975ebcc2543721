"""The StoreNode: one process per machine that looks after its KV tiers."""
