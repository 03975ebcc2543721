"""`python -m headrace.cli` is `headrace`."""

from headrace.cli import app

app()
