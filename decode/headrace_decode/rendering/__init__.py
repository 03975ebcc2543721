"""Rendering a request's prompt as the engine would get it, without an answer."""
