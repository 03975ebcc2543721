"""How replicas share their drafting memories."""
