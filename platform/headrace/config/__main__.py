"""`python -m headrace.config` prints docs/configuration.md."""

from headrace.config.docs import render

print(render(), end="")
