"""Texts to learn from and to measure on."""
