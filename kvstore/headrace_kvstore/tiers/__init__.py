"""Where KV blocks are kept beside the DRAM arena."""
