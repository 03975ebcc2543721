"""Prompts of requests as the engine would get them, without an answer."""
