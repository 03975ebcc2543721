"""The retrieval memory: token sequences found by suffix, and the acceptance of continuations."""
