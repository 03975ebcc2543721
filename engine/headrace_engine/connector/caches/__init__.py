"""An engine's KV cache as the store copies it: on a host, on a device, or quantised."""
