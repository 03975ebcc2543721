"""Sharing of drafting memories between replicas."""
