"""Where a request goes: what the replicas tell of themselves, and the plan that follows."""
