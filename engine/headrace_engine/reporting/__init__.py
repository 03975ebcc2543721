"""A replica's messages to all gateways: numbered reports, and the KV blocks of its engine."""
