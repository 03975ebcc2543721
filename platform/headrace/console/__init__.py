"""The web console at `/console`: static files (`files`) that show what the gateway's own documents
say. It has no build step and asks no other host."""
