"""The replica's own HTTP port: access, health, public routes, long work on the event loop."""
