"""Models whose upper layers keep no KV: FusedKV, FusedKV-Lite, and the baselines CLA and YOCO."""
