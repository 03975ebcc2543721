"""What replicas tell each other of their drafting memories."""
