"""The StoreNode: one process per machine that manages its KV tiers."""
