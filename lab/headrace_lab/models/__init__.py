"""Models in plain torch, and scores of what they compute."""
