"""Carrying out plans: remote prefill with a local fallback, KV blending, limits of fan-out."""
