"""The node's arena, as the two sides of an engine's connector use it."""
