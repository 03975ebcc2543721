"""`headrace lab calibrate`: the budget of each lossy technique for an allowed error."""

from headrace_lab.cli.calibrate.commands import calibrate_app

__all__ = ["calibrate_app"]
