"""The identity of an engine's KV: configuration, weights, adapters."""
