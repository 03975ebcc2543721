"""Checking clients' grammars: each is compiled in a confined process before an engine gets it."""
