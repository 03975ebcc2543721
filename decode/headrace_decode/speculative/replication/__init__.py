"""Replication of memory segments between decode replicas."""
