"""Options that several commands have."""

from __future__ import annotations

from typing import Annotated

import typer

NameOption = Annotated[
    str | None,
    typer.Option(
        "--name",
        help="Name of the instance. Needed only if several are running. HEADRACE_URL in the "
        "environment names an app elsewhere instead.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
