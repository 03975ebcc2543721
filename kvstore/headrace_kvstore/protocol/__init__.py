"""The messages between a machine's processes and its StoreNode, and its events."""
