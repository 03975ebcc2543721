"""The web console at `/console`: static files (`files`) that show the gateway's own documents. It
has no build step and asks no other host."""
