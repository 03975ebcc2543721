"""Planner of one decode replica: its own view of the prefill replicas, and what it measured."""
