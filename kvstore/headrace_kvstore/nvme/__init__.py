"""The NVMe tier: KV blocks in files, and the mover that reads and writes them."""
