"""Prints the documents of a running instance as tables."""
