"""The NVMe tier: KV blocks in files, and the threads that read and write them."""
