"""Which blocks every engine and node holds, learned from their events."""
