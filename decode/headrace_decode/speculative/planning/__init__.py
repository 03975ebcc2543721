"""The decision how many draft tokens an engine step verifies."""
