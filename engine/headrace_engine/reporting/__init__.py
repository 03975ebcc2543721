"""What a replica tells every gateway: numbered reports, and which KV blocks its engine holds."""
