"""Models in plain torch, and scores of their answers."""
