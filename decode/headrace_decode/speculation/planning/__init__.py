"""How many draft tokens an engine step verifies."""
