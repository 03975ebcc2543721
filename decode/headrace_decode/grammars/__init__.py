"""Grammars of clients: each is compiled once in a confined process before any engine sees it."""
