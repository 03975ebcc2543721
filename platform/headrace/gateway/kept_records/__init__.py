"""Records that gateways keep between requests: conversation state, files and batches, and usage.

A store (`record_store`) is SQLite or an object store. The records of tenants are sealed
(`record_cipher`, `tenant_records`) and used in threads, never on the event loop (`state_runner`).
"""
