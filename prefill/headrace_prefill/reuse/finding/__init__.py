"""Finds runs of a prompt's tokens in what was stored, wherever they stand in both."""
