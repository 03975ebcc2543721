"""`headrace lab`: simulate a cluster, calibrate lossy techniques, and make cross-layer models."""

from __future__ import annotations

from importlib.util import find_spec

import typer

from headrace.cli.console import CliError
from headrace_lab.cli.calibrate import calibrate_app
from headrace_lab.cli.cross_layer import cross_layer_app
from headrace_lab.cli.simulate import simulate

NEEDED = ("safetensors", "torch", "transformers")
"""Packages that all commands but `simulate` import; the extra `lab` installs them, and so does
vLLM."""

lab_app = typer.Typer(
    help="Simulate a cluster, calibrate lossy techniques, and make models that keep less KV: see "
    "docs/lab.md.",
    no_args_is_help=True,
)
lab_app.add_typer(calibrate_app, name="calibrate")
lab_app.add_typer(cross_layer_app, name="cross-layer")
lab_app.command()(simulate)


@lab_app.callback()
def check_installed(context: typer.Context) -> None:
    """Check that the packages of the extra `lab` are there, for a command that imports them.

    Raises:
        CliError: one is missing.
    """
    if context.invoked_subcommand == "simulate":
        return
    if missing := [name for name in NEEDED if find_spec(name) is None]:
        raise CliError(
            f"headrace lab needs {', '.join(missing)}: install it with pip install 'headrace[lab]'"
        )
