"""Changes to an app's arguments: the KV store, speculative decoding and lossy techniques."""
