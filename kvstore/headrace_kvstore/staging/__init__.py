"""Moves of blocks between the arena and slower tiers: write-behind and prefetch."""
