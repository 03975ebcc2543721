"""Access of clients to the gateway: connections, keys, limits, the budget for bodies, TLS."""
