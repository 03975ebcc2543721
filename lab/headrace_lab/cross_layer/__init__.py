"""Models that keep less KV: trained from scratch, or converted from checkpoints."""
