"""The drafting memory: token sequences searched by suffix, and acceptance of continuations."""
