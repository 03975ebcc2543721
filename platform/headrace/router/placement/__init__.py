"""Placement of one prompt: prices of all pairs of engines, and the search for the cheapest."""
